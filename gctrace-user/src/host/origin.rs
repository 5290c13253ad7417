//! The origin of a process: its service, from what its OpenTelemetry SDK publishes, its initial environment, its systemd unit or its
//! command line, and where it runs.

use std::path::Path;

use gctrace_tunemygc::printable::printable;

use super::{environ::Environment, process_context, root_file};
use crate::{
    model::{Container, Origin, server},
    words::percent_decoded,
};

/// Maximum length of names and values in characters; longer ones are truncated, because they become labels.
const MAX_TEXT: usize = 200;
/// The SDK's name for a service without a configured name (semantic conventions, `service.name`).
const UNNAMED: &str = "unknown_service";
/// Maximum number of attributes that are kept.
const MAX_ATTRIBUTES: usize = 32;
/// Where a container in Kubernetes finds its namespace.
const NAMESPACE: &str = "var/run/secrets/kubernetes.io/serviceaccount/namespace";

/// Reads the origin; what cannot be read is absent. `container`: where the process runs; `environment`: its initial one, if known.
pub fn read(
    pid: u32,
    comm: &str,
    cmdline: &[String],
    container: &Container,
    environment: Option<&Environment>,
) -> Origin {
    let published = process_context::read(pid).unwrap_or_default();
    let mut origin =
        tell(&published, environment.unwrap_or(&Environment::default()), container, comm, cmdline);
    if origin.pod.is_some() && origin.namespace.is_none() {
        origin.namespace = root_file::line(pid, NAMESPACE).map(|name| clean(&name));
    }
    origin
}

fn tell(
    published: &[(String, String)],
    environment: &Environment,
    container: &Container,
    comm: &str,
    cmdline: &[String],
) -> Origin {
    let environment = &environment.service;
    let set = |name: &str| environment.get(name).filter(|value| !value.is_empty()).cloned();
    let list = environment.get("OTEL_RESOURCE_ATTRIBUTES").map_or_else(Vec::new, |list| listed(list));
    // The SDK publishes the result of the environment and the program's own settings.
    let mut attributes = published.iter().filter_map(taken).collect::<Vec<_>>();
    let own = service_name(&mut attributes).filter(|name| !name.starts_with(UNNAMED));
    let mut list =
        list.into_iter().filter(|(key, _)| attributes.iter().all(|(known, _)| known != key)).collect();
    let named = service_name(&mut list);
    attributes.append(&mut list);
    attributes.truncate(MAX_ATTRIBUTES);
    let service = own
        .or_else(|| set("OTEL_SERVICE_NAME"))
        .or(named)
        .or_else(|| set("DD_SERVICE"))
        .or_else(|| unit(container.unit.as_deref()?))
        .unwrap_or_else(|| program(comm, cmdline));
    Origin {
        service: clean(&service),
        container: container.id.clone(),
        pod: container.pod_uid.clone(),
        namespace: container.namespace.clone(),
        attributes,
    }
}

/// A published attribute, if it is meaningful outside the process's namespaces, in which its pids differ.
fn taken((key, value): &(String, String)) -> Option<(String, String)> {
    let (key, value) = (clean(key), clean(value));
    let usable =
        !key.is_empty() && !value.is_empty() && !matches!(&*key, "process.pid" | "process.parent_pid");
    usable.then_some((key, value))
}

/// Removes and returns the name of the service from attributes.
fn service_name(attributes: &mut Vec<(String, String)>) -> Option<String> {
    let at = attributes.iter().position(|(key, _)| key == "service.name")?;
    Some(attributes.remove(at).1)
}

/// `key=value,key=value` with percent-encoded values (OpenTelemetry's resource SDK specification).
fn listed(list: &str) -> Vec<(String, String)> {
    let pairs = list.split(',').filter_map(|pair| pair.split_once('='));
    pairs
        .map(|(key, value)| (clean(key.trim()), clean(&percent_decoded(value.trim()))))
        .filter(|(key, value)| !key.is_empty() && !value.is_empty())
        .collect()
}

/// The service of a systemd unit, without `.service`.
fn unit(name: &str) -> Option<String> {
    // `user@1000.service` is the manager of everything that a user runs.
    let unit = name.strip_suffix(".service").filter(|unit| !unit.starts_with("user@"))?;
    // For instances of a template, the template is the service.
    Some(unit.split('@').next().unwrap_or(unit).to_owned())
}

/// The script that a command line names, or the name that the program has set.
pub(crate) fn program(comm: &str, cmdline: &[String]) -> String {
    let name = |path: &str| Path::new(path).file_name().map(|name| name.to_string_lossy().into_owned());
    let found = match server::title(cmdline) {
        // `puma: cluster worker 0: 17 [shop]`
        Some(title) => title.split(' ').next().map(|first| first.trim_end_matches(':')),
        None => server::script(cmdline).map(|(script, _)| script),
    };
    found.and_then(name).unwrap_or_else(|| comm.to_owned())
}

fn clean(text: &str) -> String {
    // Service names appear in messages, labels and web pages.
    printable(text).chars().take(MAX_TEXT).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::container::parse;

    fn words(line: &str) -> Vec<String> {
        line.split(' ').map(ToOwned::to_owned).collect()
    }

    /// The first source that has a name for the service provides it.
    #[test]
    fn services() {
        let ruby = words("/usr/bin/ruby -w -I lib /srv/shop/bin/work.rb 1");
        let unit = "/system.slice/shop@3.service";
        let full = b"OTEL_SERVICE_NAME=web\0OTEL_RESOURCE_ATTRIBUTES=service.name=x,a=b%20c,broken,=y,z=%zz\0DD_SERVICE=dd\0";
        let origin = tell(&[], &Environment::parse(full), &parse(unit), "ruby", &ruby);
        assert_eq!(origin.service, "web");
        assert_eq!(origin.attributes, [("a".into(), "b c".into()), ("z".into(), "%zz".into())]);
        let environments: [(&[u8], &str, &str); 5] = [
            (b"OTEL_RESOURCE_ATTRIBUTES=service.name=x\0DD_SERVICE=dd\0", unit, "x"),
            (b"OTEL_SERVICE_NAME=\0DD_SERVICE=dd\0", unit, "dd"),
            (b"", unit, "shop"),
            (b"", "/user.slice/user-0.slice/user@0.service/app.slice/x.scope", "work.rb"),
            (b"\xff=\0", "", "work.rb"),
        ];
        for (environ, cgroup, service) in environments {
            let environment = Environment::parse(environ);
            assert_eq!(tell(&[], &environment, &parse(cgroup), "ruby", &ruby).service, service);
        }
    }

    /// Published attributes take precedence over the environment, except for a placeholder name; pids of the process's own namespace
    /// are not shown.
    #[test]
    fn published() {
        let environment = Environment::parse(b"OTEL_SERVICE_NAME=web\0OTEL_RESOURCE_ATTRIBUTES=a=1,b=2\0");
        let of = |published: &[(&str, &str)]| {
            let published = published
                .iter()
                .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
                .collect::<Vec<_>>();
            tell(&published, &environment, &parse(""), "ruby", &[])
        };
        let origin =
            of(&[("service.name", "shop"), ("a", "9"), ("process.pid", "7"), ("\u{1b}c", "x\n"), ("d", "")]);
        assert_eq!(origin.service, "shop");
        let keys = origin.attributes.iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>();
        assert_eq!(keys[0], "a=9");
        assert_eq!(keys[2..], ["b=2"], "{keys:?}");
        assert!(!keys[1].contains(['\u{1b}', '\n']), "{keys:?}");
        assert_eq!(of(&[("service.name", "unknown_service:ruby")]).service, "web");
    }

    /// Scripts, titles, and neither.
    #[test]
    fn programs() {
        assert_eq!(program("ruby", &words("ruby -rjson -e sleep")), "ruby");
        assert_eq!(program("ruby", &words("ruby3.1 a/b.rb")), "b.rb");
        assert_eq!(program("ruby", &["puma: cluster worker 0: 17 [shop]".into()]), "puma");
        assert_eq!(program("puma", &[]), "puma");
        assert_eq!(program("unicorn", &words("/usr/bin/unicorn -c x.rb")), "unicorn");
    }
}
