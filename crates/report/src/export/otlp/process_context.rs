//! What a process publishes about itself to external readers: the payload of OpenTelemetry's process context (OTEP
//! 4719, `opentelemetry.proto.processcontext.v1development`).

use opentelemetry_proto::tonic::{common::v1::any_value::Value, resource::v1::Resource};
use prost::Message as _;

/// `ProcessContext`. Its field 2, the attributes outside the resource, is not read.
#[derive(Clone, PartialEq, prost::Message)]
struct ProcessContext {
    #[prost(message, optional, tag = "1")]
    resource: Option<Resource>,
}

/// The resource attributes of a payload that are a single string, number or boolean, in order; lists and maps are left
/// out. Returns `None` if the payload is not a `ProcessContext`.
pub fn attributes(payload: &[u8]) -> Option<Vec<(String, String)>> {
    let context = ProcessContext::decode(payload).ok()?;
    let attributes = context.resource.unwrap_or_default().attributes.into_iter();
    let scalar = |value: Value| match value {
        Value::StringValue(text) => Some(text),
        Value::BoolValue(value) => Some(value.to_string()),
        Value::IntValue(value) => Some(value.to_string()),
        Value::DoubleValue(value) => Some(value.to_string()),
        _ => None,
    };
    let pair = |(key, value): (String, Value)| Some((key, scalar(value)?));
    Some(attributes.filter_map(|attribute| pair((attribute.key, attribute.value?.value?))).collect())
}

#[cfg(test)]
mod tests {
    use opentelemetry_proto::tonic::common::v1::ArrayValue;
    use proptest::prelude::*;

    use super::{
        super::{attribute, text},
        *,
    };

    /// Scalars become strings, everything else is left out; the rest of the message after the resource is ignored.
    #[test]
    fn scalars() {
        let attributes_in = vec![
            text("service.name", "shop"),
            attribute("a.list", Value::ArrayValue(ArrayValue::default())),
            attribute("a.number", Value::IntValue(-3)),
            attribute("a.truth", Value::BoolValue(true)),
        ];
        let resource = Resource { attributes: attributes_in, ..Resource::default() };
        let mut bytes = ProcessContext { resource: Some(resource) }.encode_to_vec();
        // Field 2 with an empty message.
        bytes.extend([0x12, 0]);
        let found = attributes(&bytes).unwrap();
        let expected = [("service.name", "shop"), ("a.number", "-3"), ("a.truth", "true")];
        assert_eq!(found, expected.map(|(key, value)| (key.to_owned(), value.to_owned())));
        assert_eq!(attributes(&[]), Some(Vec::new()));
        assert_eq!(attributes(b"\x0a\x05short"), None);
    }

    proptest! {
        /// Hostile bytes are refused or read, and never yield more data than they contain.
        #[test]
        fn hostile(bytes in prop::collection::vec(any::<u8>(), 0..512), flips in prop::collection::vec((0_usize..80, any::<u8>()), 0..4)) {
            let resource = Resource { attributes: vec![text("service.name", "shop"), text("b", "c")], ..Resource::default() };
            let mut changed = ProcessContext { resource: Some(resource) }.encode_to_vec();
            for (at, byte) in flips {
                let at = at % changed.len();
                changed[at] = byte;
            }
            for payload in [&bytes, &changed] {
                let kept: usize = attributes(payload).into_iter().flatten().map(|(key, _)| key.len()).sum();
                prop_assert!(kept <= payload.len());
            }
        }
    }
}
