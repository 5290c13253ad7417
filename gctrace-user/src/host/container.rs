//! Containers, identified by cgroup names. Every runtime writes the id of a container into the path of its cgroup.

use super::proc_root;
use crate::model::{Container, Runtime};

/// The cgroups of a process, from `/proc/PID/cgroup`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cgroups {
    /// Path in the v2 hierarchy, if there is one.
    pub v2: Option<String>,
    /// Path in each v1 hierarchy, with its controllers or name.
    pub v1: Vec<(String, String)>,
}

impl Cgroups {
    /// The cgroups of a process; `None` once it is gone. Bytes of their names that are not UTF-8 are replaced.
    pub fn of(pid: u32) -> Option<Self> {
        Some(Self::parse(&proc_root::text(pid, "cgroup").ok()?))
    }

    /// From the text of `/proc/PID/cgroup` (cgroups(7)): `hierarchy:controllers:path`.
    pub fn parse(text: &str) -> Self {
        let mut found = Self::default();
        for line in text.lines() {
            let mut fields = line.splitn(3, ':');
            let (Some(hierarchy), Some(controllers), Some(path)) =
                (fields.next(), fields.next(), fields.next())
            else {
                continue;
            };
            // The cgroup was removed while the process was in it.
            let path = path.strip_suffix(" (deleted)").unwrap_or(path).to_owned();
            if hierarchy == "0" && controllers.is_empty() {
                found.v2 = Some(path);
            } else {
                found.v1.push((controllers.to_owned(), path));
            }
        }
        // The systemd hierarchy first: it shows the units; runtimes use all hierarchies.
        found.v1.sort_by_key(|(controllers, _)| controllers != "name=systemd");
        found
    }

    /// All paths, the most informative first.
    fn paths(&self) -> impl Iterator<Item = &str> {
        self.v2.iter().map(String::as_str).chain(self.v1.iter().map(|(_, path)| path.as_str()))
    }

    /// The container that the paths show. On a hybrid host the v2 path may be the root while the v1 paths show the container.
    pub fn container(&self) -> Container {
        let path = self.paths().find(|path| *path != "/").unwrap_or("/");
        let named = self.paths().map(parse).find(|named| named.id.is_some()).unwrap_or_else(|| parse(path));
        Container { cgroup: Some(path.to_owned()), ..named }
    }
}

/// Number of hexadecimal digits of a container id.
const ID_LEN: usize = 64;

/// Parses the path of a cgroup: the innermost container, its pod, the systemd unit. Parts that the path does not show are `None`.
pub fn parse(path: &str) -> Container {
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
    let innermost = parts.iter().enumerate().rev().find_map(|(at, part)| {
        let (prefix, id) = id_of(part)?;
        let above = at.checked_sub(1).map_or("", |above| parts[above]);
        Some((at, runtime(prefix, above), id.to_owned()))
    });
    let (below, runtime, id) = match innermost {
        Some((at, runtime, id)) => (at + 1, runtime, Some(id)),
        None => (0, None, None),
    };
    let is_unit = |part: &&&str| matches!(part.rsplit_once('.'), Some((_, "service" | "scope")));
    let unit = parts[below..].iter().rev().find(is_unit);
    Container {
        id,
        runtime,
        pod_uid: parts[..below].iter().rev().find_map(|part| pod_uid(part)),
        unit: unit.map(|unit| (*unit).to_owned()),
        cgroup: Some(path.to_owned()),
        ..Container::default()
    }
}

/// The prefix before a container id, and the id, if the name of a cgroup ends with one.
fn id_of(part: &str) -> Option<(&str, &str)> {
    let name = part.strip_suffix(".scope").unwrap_or(part);
    let (prefix, id) = name.split_at_checked(name.len().checked_sub(ID_LEN)?)?;
    let hex = id.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte));
    // `libpod-conmon-ID` and `crio-conmon-ID` are cgroups of a container's monitor, which is outside the container.
    let monitor = prefix.ends_with("conmon-");
    let separated = prefix.is_empty() || prefix.ends_with(['-', ':']);
    (hex && separated && !monitor).then_some((prefix, id))
}

/// The runtime that uses this prefix, or this parent if there is no prefix.
fn runtime(prefix: &str, above: &str) -> Option<Runtime> {
    // containerd turns a systemd path into `SLICE:cri-containerd:ID` when it manages cgroups itself.
    let name = prefix.trim_end_matches(['-', ':']);
    let name = name.rsplit(':').next().unwrap_or(name);
    match name {
        "docker" => Some(Runtime::Docker),
        "cri-containerd" | "containerd" | "nerdctl" => Some(Runtime::Containerd),
        "crio" => Some(Runtime::CriO),
        "libpod" => Some(Runtime::Podman),
        "" if above == "docker" => Some(Runtime::Docker),
        _ => None,
    }
}

/// The uid of a pod: `podUID` where the kubelet manages cgroups, `…-podUID.slice` with `_` for `-` where systemd does.
fn pod_uid(part: &str) -> Option<String> {
    let name = part.split(':').next().unwrap_or(part);
    let name = name.strip_suffix(".slice").unwrap_or(name);
    let uid = match name.rsplit_once("-pod") {
        Some((_, uid)) => uid,
        None => name.strip_prefix("pod")?,
    };
    let uid = uid.replace('_', "-");
    // A UUID, or the hash that identifies a static pod.
    let digits = uid.bytes().filter(u8::is_ascii_hexdigit).count();
    let dashes = uid.bytes().filter(|byte| *byte == b'-').count();
    (digits == 32 && (dashes == 0 || dashes == 4) && digits + dashes == uid.len()).then_some(uid)
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: &str = "3f4b8d3e5c6a7f8091a2b3c4d5e6f708192a3b4c5d6e7f8091a2b3c4d5e6f708";
    const B: &str = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";
    const UID: &str = "0f9a2b1c-4d5e-6f70-8192-a3b4c5d6e7f8";

    fn named(path: &str) -> (Option<String>, Option<Runtime>, Option<String>, Option<String>) {
        let Container { id, runtime, pod_uid, unit, .. } = parse(path);
        (id, runtime, pod_uid, unit)
    }

    /// Paths as the runtimes write them, for both cgroup managers: systemd and the runtime itself.
    #[test]
    fn runtimes() {
        let uid = UID.replace('-', "_");
        let pod = Some(UID);
        let podless: Option<&str> = None;
        let cases = [
            (format!("/docker/{A}"), Some(Runtime::Docker), podless),
            (format!("/system.slice/docker-{A}.scope"), Some(Runtime::Docker), podless),
            (
                format!("/user.slice/user-1000.slice/user@1000.service/user.slice/docker-{A}.scope"),
                Some(Runtime::Docker),
                podless,
            ),
            (format!("/machine.slice/libpod-{A}.scope"), Some(Runtime::Podman), podless),
            (format!("/machine.slice/libpod-{A}.scope/container"), Some(Runtime::Podman), podless),
            (format!("/libpod_parent/libpod-{A}"), Some(Runtime::Podman), podless),
            (
                format!(
                    "/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{A}.scope/container"
                ),
                Some(Runtime::Podman),
                podless,
            ),
            (
                format!("/machine.slice/machine-libpod_pod_{B}.slice/libpod-{A}.scope"),
                Some(Runtime::Podman),
                podless,
            ),
            (format!("/system.slice/nerdctl-{A}.scope"), Some(Runtime::Containerd), podless),
            (
                format!(
                    "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{uid}.slice/cri-containerd-{A}.scope"
                ),
                Some(Runtime::Containerd),
                pod,
            ),
            (format!("/kubepods.slice/kubepods-pod{uid}.slice/crio-{A}.scope"), Some(Runtime::CriO), pod),
            (
                format!(
                    "/system.slice/containerd.service/kubepods-besteffort-pod{uid}.slice:cri-containerd:{A}"
                ),
                Some(Runtime::Containerd),
                podless,
            ),
            (format!("/kubepods/burstable/pod{UID}/{A}"), None, pod),
            (format!("/kubepods/pod{UID}/crio-{A}"), Some(Runtime::CriO), pod),
            (
                format!(
                    "/system.slice/docker-{B}.scope/kubelet.slice/kubelet-kubepods.slice/\
                     kubelet-kubepods-besteffort.slice/kubelet-kubepods-besteffort-pod{uid}.slice/cri-containerd-{A}.scope"
                ),
                Some(Runtime::Containerd),
                pod,
            ),
            (format!("/ecs/0123456789abcdef0123456789abcdef/{A}"), None, podless),
            (format!("/../../kubepods/burstable/pod{UID}/{A}"), None, pod),
        ];
        for (path, runtime, pod) in cases {
            let pod = if path.contains(":cri-containerd:") { Some(UID) } else { pod };
            let expected = (Some(A.to_owned()), runtime, pod.map(ToOwned::to_owned), None);
            assert_eq!(named(&path), expected, "{path}");
        }
    }

    /// Static pods are identified by a hash.
    #[test]
    fn static_pod() {
        let hash = "8d3e5c6a7f8091a2b3c4d5e6f7081920";
        let (_, _, pod, _) = named(&format!("/kubepods/burstable/pod{hash}/{A}"));
        assert_eq!(pod.as_deref(), Some(hash));
    }

    /// Units, sessions, the monitors of containers, and names that resemble ids are not containers.
    #[test]
    fn no_container() {
        for (path, unit) in [
            ("/".to_owned(), None),
            ("/system.slice/puma.service".to_owned(), Some("puma.service")),
            ("/system.slice/system-puma.slice/puma@3000.service".to_owned(), Some("puma@3000.service")),
            ("/user.slice/user-1000.slice/session-3.scope".to_owned(), Some("session-3.scope")),
            (
                "/user.slice/user-1000.slice/user@1000.service/app.slice/app-irb.service".to_owned(),
                Some("app-irb.service"),
            ),
            (format!("/machine.slice/libpod-conmon-{A}.scope"), Some(&*format!("libpod-conmon-{A}.scope"))),
            (format!("/kubepods/crio-conmon-{A}"), None),
            (format!("/docker/{}", &A[1..]), None),
            (format!("/docker/{}", A.to_uppercase()), None),
            (format!("/docker/f{A}"), None),
            ("/libpod_parent/conmon".to_owned(), None),
        ] {
            assert_eq!(named(&path), (None, None, None, unit.map(ToOwned::to_owned)), "{path}");
        }
    }

    /// A unit inside a container belongs to the container's systemd; a unit that contains the container's cgroup is not reported.
    #[test]
    fn unit_inside() {
        let (id, _, _, unit) = named(&format!("/system.slice/docker-{A}.scope/system.slice/puma.service"));
        assert_eq!((id.as_deref(), unit.as_deref()), (Some(A), Some("puma.service")));
    }

    /// Files of all three kinds of hosts; a path may contain colons.
    #[test]
    fn files() {
        let v2 = Cgroups::parse("0::/system.slice/a:b.service\n");
        assert_eq!(v2.v2.as_deref(), Some("/system.slice/a:b.service"));
        let text = format!("12:pids:/docker/{A}\n1:name=systemd:/docker/{A}\n0::/\n");
        let hybrid = Cgroups::parse(&text);
        assert_eq!(hybrid.v2.as_deref(), Some("/"));
        assert_eq!(hybrid.v1[0].0, "name=systemd");
        let container = hybrid.container();
        assert_eq!((container.id.as_deref(), container.runtime), (Some(A), Some(Runtime::Docker)));
        assert_eq!(container.cgroup, Some(format!("/docker/{A}")));
        assert_eq!(Cgroups::parse("nonsense\n\n0:\n"), Cgroups::default());
    }
}
