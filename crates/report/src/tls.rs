//! How gctrace connects to servers: the one set-up of TLS for pushes over HTTP and gRPC, TuneMyGC collectors and debuginfod. TLS 1.2
//! or later, with the certificates that the host trusts, so that a company's own authority works. Nothing skips verification.

use std::{sync::Arc, time::Duration};

use rustls::{ClientConfig, crypto::CryptoProvider};
use rustls_platform_verifier::BuilderVerifierExt as _;
use ureq::{
    Agent,
    config::ConfigBuilder,
    tls::{RootCerts, TlsConfig},
    typestate::AgentScope,
};

/// How gctrace calls itself to servers.
pub const USER_AGENT: &str = concat!("gctrace/", env!("CARGO_PKG_VERSION"));

fn crypto() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// An HTTP/1.1 client to be completed. `timeout` is for one exchange, from the look-up of the name to the last byte; `connect` for
/// the connection alone.
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

/// TLS for a protocol that is not HTTP/1.1, by its name in ALPN (RFC 7301).
pub fn client(protocol: &[u8]) -> Result<Arc<ClientConfig>, rustls::Error> {
    let mut config = ClientConfig::builder_with_provider(crypto())
        .with_safe_default_protocol_versions()?
        .with_platform_verifier()?
        .with_no_client_auth();
    config.alpn_protocols = vec![protocol.to_vec()];
    Ok(Arc::new(config))
}
