//! TLS configuration for all connections to servers: pushes over HTTP and gRPC, TuneMyGC collectors and debuginfod. TLS 1.2
//! or later, with the certificates that the host trusts, so that a company's own CA works. Nothing skips verification.

use std::{borrow::Cow, sync::Arc, time::Duration};

use rustls::{ClientConfig, crypto::CryptoProvider};
use rustls_platform_verifier::BuilderVerifierExt as _;
use ureq::{
    Agent,
    config::ConfigBuilder,
    tls::{RootCerts, TlsConfig},
    typestate::AgentScope,
};

/// The user agent that gctrace sends to servers.
pub const USER_AGENT: &str = concat!("gctrace/", env!("CARGO_PKG_VERSION"));

/// The name by which the verifier of certificates logs. A certificate that is refused is reported with the upload that failed; the verifier would
/// repeat it for each attempt.
pub const VERIFIER_LOG: &str = "rustls_platform_verifier";

fn crypto() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// Starts the configuration of an HTTP/1.1 client. `timeout` limits one exchange, from name resolution to the last byte; `connect`
/// limits the connection alone.
pub fn http(timeout: Duration, connect: Duration) -> ConfigBuilder<AgentScope> {
    let tls = TlsConfig::builder()
        .root_certs(RootCerts::PlatformVerifier)
        .unversioned_rustls_crypto_provider(crypto())
        .build();
    Agent::config_builder()
        .timeout_global(Some(timeout))
        .timeout_connect(Some(connect.min(timeout)))
        .user_agent(USER_AGENT)
        .tls_config(tls)
}

/// The proxy of the environment (`http_proxy`, `https_proxy`, `all_proxy`; not for hosts in `no_proxy`) that requests to this URL go
/// through, `HOST:PORT`.
fn proxy(url: &str) -> Option<String> {
    let (proxy, uri) = (ureq::Proxy::try_from_env()?, url.parse().ok()?);
    (!proxy.is_no_proxy(&uri)).then(|| format!("{}:{}", proxy.host(), proxy.port()))
}

/// Why a request over HTTP/1.1 to this URL failed, with the proxy, if there is one: it may be the proxy that was not reached.
pub fn failed(url: &str, error: &ureq::Error) -> String {
    let text = error.to_string();
    let why = why(&text);
    proxy(url).map_or_else(
        || why.to_string(),
        |proxy| format!("{why} (through {proxy}, the proxy of the environment)"),
    )
}

/// TLS configuration for a protocol other than HTTP/1.1, given by its ALPN name (RFC 7301).
pub fn client(protocol: &[u8]) -> Result<Arc<ClientConfig>, rustls::Error> {
    let mut config = ClientConfig::builder_with_provider(crypto())
        .with_safe_default_protocol_versions()?
        .with_platform_verifier()?
        .with_no_client_auth();
    config.alpn_protocols = vec![protocol.to_vec()];
    Ok(Arc::new(config))
}

/// Explains the error `CaUsedAsEndEntity` of webpki for a server certificate, and the remedy. `openssl req -x509` makes such
/// certificates.
const CA_AS_SERVER: &str = "the server shows a CA's certificate as its own: give it one that the CA signed, or make a \
                            self-signed one with `openssl req -x509 -addext basicConstraints=CA:FALSE`";

/// Why a server was not reached, from the text of a client's error and its sources. Clients wrap TLS errors in types of their own,
/// so this searches the text for webpki's name of the error.
pub fn why(error: &str) -> Cow<'_, str> {
    if error.contains("CaUsedAsEndEntity") { CA_AS_SERVER.into() } else { error.into() }
}

#[cfg(test)]
mod tests {
    use rustls::{
        RootCertStore,
        client::{WebPkiServerVerifier, danger::ServerCertVerifier as _},
        pki_types::{CertificateDer, ServerName, UnixTime, pem::PemObject as _},
    };

    use super::*;

    /// Created with `openssl req -x509 -newkey ec -days 36500 -subj /CN=localhost -addext subjectAltName=DNS:localhost`.
    const CA: &str = "\
-----BEGIN CERTIFICATE-----
MIIBlDCCATugAwIBAgIUPGoqHwYBTFzG1bOZTDxnEY8N2awwCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEyMjIxMDIwOFoYDzIxMjYxMDI5
MjEwMjA4WjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAAQ3Ev+AwUMC5HqnhGgYCr+ht3yykcBkZQuD5AUeZ5ytogJmTuOSJIl9
746o+upHiaQTbbpkX19rDPo9rFFUOwRxo2kwZzAdBgNVHQ4EFgQU+tEIf2FWvE5s
LetMP8rPV89KfeEwHwYDVR0jBBgwFoAU+tEIf2FWvE5sLetMP8rPV89KfeEwDwYD
VR0TAQH/BAUwAwEB/zAUBgNVHREEDTALgglsb2NhbGhvc3QwCgYIKoZIzj0EAwID
RwAwRAIgLx8ThIrbILAlo5GsbWzpwMFUL3WzTI4DLmfjcKrZb1cCIAX4Hfg2z6EF
nGqY2DcMJ8BHJ7LJW+LN2UThZbU7zKSB
-----END CERTIFICATE-----
";
    /// The same with `-addext basicConstraints=CA:FALSE`.
    const SERVER: &str = "\
-----BEGIN CERTIFICATE-----
MIIBjzCCATWgAwIBAgIUAoArSw56ySDGMaKMm31w56hb8t0wCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEyMjIxMDIwOFoYDzIxMjYxMDI5
MjEwMjA4WjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAATBkJleZXJAM5kUSgzB8wb22aZCb2WdEDD6RmEJXtsZw51kPYTRKJJu
mV3UmK4ZFSvpg584CBSr6g3iTIlQVU2Wo2MwYTAdBgNVHQ4EFgQU252Cm22hoRYm
2qKapIF4rhwo8yowHwYDVR0jBBgwFoAU252Cm22hoRYm2qKapIF4rhwo8yowFAYD
VR0RBA0wC4IJbG9jYWxob3N0MAkGA1UdEwQCMAAwCgYIKoZIzj0EAwIDSAAwRQIh
AOHy7/ZhQwCMnR448jnmWvZeILBF0lKPB0MSIm5/2lwaAiABlBui1IPj3CajLZLn
pTfBz1wzTGIlTgPgxAH4u3twug==
-----END CERTIFICATE-----
";

    /// The result of verifying a server that presents this certificate, by a client that trusts it.
    fn verified(pem: &str) -> Result<(), String> {
        let certificate = CertificateDer::from_pem_slice(pem.as_bytes()).unwrap();
        let mut trusted = RootCertStore::empty();
        trusted.add(certificate.clone()).unwrap();
        let verifier =
            WebPkiServerVerifier::builder_with_provider(Arc::new(trusted), crypto()).build().unwrap();
        let (name, now) = (ServerName::try_from("localhost").unwrap(), Duration::from_hours(24 * 365 * 60));
        verifier
            .verify_server_cert(&certificate, &[], &name, &[], UnixTime::since_unix_epoch(now))
            .map(drop)
            .map_err(|error| ureq::Error::from(error).to_string())
    }

    /// A CA certificate used as a server certificate is refused with a remedy, and the remedy works.
    #[test]
    fn a_ca_is_no_server() {
        let refused = verified(CA).unwrap_err();
        assert_eq!(why(&refused), CA_AS_SERVER, "{refused}");
        assert!(CA_AS_SERVER.len() <= 200, "longer reasons are cut off");
        assert_eq!(verified(SERVER), Ok(()));
        assert_eq!(why("connection refused"), "connection refused");
    }
}
