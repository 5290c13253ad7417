//! Certificates.

use std::{
    io::ErrorKind,
    path::{Path, PathBuf},
    sync::Arc,
};

use rustls::{
    ServerConfig,
    pki_types::{
        CertificateDer, PrivateKeyDer,
        pem::{self, PemObject as _},
    },
};
use tokio_rustls::TlsAcceptor;

/// Why TLS cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read, or does not contain what it should.
    #[error("{what} {}: {why}", path.display())]
    File {
        /// What it should contain.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The reason.
        why: String,
    },
    /// The certificate and the key do not match.
    #[error("the certificate {} cannot be used with the key {}: {why}", chain.display(), key.display())]
    Pair {
        /// The file with the certificate.
        chain: PathBuf,
        /// The file with the key.
        key: PathBuf,
        /// The reason.
        why: rustls::Error,
    },
}

/// The error in a file, and what to provide instead.
fn why_no_key(error: &pem::Error) -> String {
    match error {
        pem::Error::NoItemsFound => {
            "holds no private key in PEM (-----BEGIN PRIVATE KEY-----); give the key of the certificate to --tls-key"
                .to_owned()
        }
        error => why(error),
    }
}

/// The error in a file.
fn why(error: &pem::Error) -> String {
    match error {
        // Such as a key of root's, for a service that runs as another user.
        pem::Error::Io(denied) if denied.kind() == ErrorKind::PermissionDenied => {
            format!("{denied}: the user that the collector runs as must be able to read it")
        }
        error => error.to_string(),
    }
}

/// Reads a certificate chain (the server's own certificate first) and its key, both PEM.
pub(super) fn load(chain: &Path, key: &Path) -> Result<TlsAcceptor, TlsError> {
    let wrong = |what, path: &Path, why: String| TlsError::File { what, path: path.to_owned(), why };
    let certificates: Vec<CertificateDer<'static>> = CertificateDer::pem_file_iter(chain)
        .and_then(Iterator::collect)
        .map_err(|error| wrong("the certificate", chain, why(&error)))?;
    if certificates.is_empty() {
        let why = "holds no certificate in PEM (-----BEGIN CERTIFICATE-----); give the chain to --tls-cert";
        return Err(wrong("the certificate", chain, why.to_owned()));
    }
    let secret =
        PrivateKeyDer::from_pem_file(key).map_err(|error| wrong("the key", key, why_no_key(&error)))?;
    let builder = ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()));
    let mut config = builder
        .with_safe_default_protocol_versions()
        .and_then(|builder| builder.with_no_client_auth().with_single_cert(certificates, secret))
        .map_err(|why| TlsError::Pair { chain: chain.to_owned(), key: key.to_owned(), why })?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A key that the collector may not read: the message says who must be able to.
    #[test]
    fn denied() {
        let error = pem::Error::Io(ErrorKind::PermissionDenied.into());
        assert_eq!(
            why_no_key(&error),
            "permission denied: the user that the collector runs as must be able to read it"
        );
        assert!(why_no_key(&pem::Error::NoItemsFound).starts_with("holds no private key"));
    }
}
