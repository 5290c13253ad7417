//! Names of containers and pods, from the files in which runtimes and the kubelet store them. No socket is queried.

use std::{
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use serde::Deserialize;

use super::container::Cgroups;
use crate::model::Container;

/// Minimum interval between lookups of a container without a name.
const FRESH: Duration = Duration::from_secs(1);

/// Looks names up.
#[derive(Debug)]
pub struct Names {
    root: PathBuf,
    kube_root: Option<PathBuf>,
    containers: HashMap<String, String>,
    missing: HashMap<String, Instant>,
}

/// A pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

/// An entry of `containers.json` of containers/storage, which Podman and CRI-O use.
#[derive(Deserialize)]
struct Stored {
    id: String,
    #[serde(default)]
    names: Vec<String>,
}

/// Part of Docker's `config.v2.json`.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Docker {
    name: String,
}

/// Where containers/storage keeps its lists, by storage driver.
const STORED: [&str; 4] = [
    "var/lib/containers/storage/overlay-containers/containers.json",
    "var/lib/containers/storage/overlay-containers/volatile-containers.json",
    "var/lib/containers/storage/vfs-containers/containers.json",
    "var/lib/containers/storage/vfs-containers/volatile-containers.json",
];

/// Where Docker keeps a folder per container.
const DOCKER: &str = "var/lib/docker/containers";

/// Where the kubelet keeps a folder `NAMESPACE_NAME_UID` per pod.
pub const PODS: &str = "var/log/pods";

impl Names {
    /// Names of the host whose files are below `root`; including pods, if the root of the kubelet's files is given.
    pub fn below(root: &Path, kube_root: Option<PathBuf>) -> Self {
        Self { root: root.to_owned(), kube_root, containers: HashMap::new(), missing: HashMap::new() }
    }

    /// The container that a process runs in, with its name.
    pub fn place(&mut self, pid: u32) -> Container {
        let mut place = Cgroups::of(pid).map(|cgroups| cgroups.container()).unwrap_or_default();
        place.name = place.id.as_deref().and_then(|id| self.container(id));
        if let Some(pod) = place.pod_uid.as_deref().and_then(|uid| self.pod(uid)) {
            place.pod = Some(pod.name);
            place.namespace = Some(pod.namespace);
        }
        place
    }

    /// The name of a container, if its runtime stores one in a file.
    pub fn container(&mut self, id: &str) -> Option<String> {
        let known = self.containers.contains_key(id);
        if !known && self.missing.get(id).is_none_or(|looked| looked.elapsed() >= FRESH) {
            self.containers = self.list();
            self.missing.retain(|_, looked| looked.elapsed() < FRESH);
            self.missing.insert(id.to_owned(), Instant::now());
        }
        self.containers.get(id).cloned()
    }

    /// Like [`Names::container`], without a new lookup.
    pub fn known(&self, id: &str) -> Option<&str> {
        self.containers.get(id).map(String::as_str)
    }

    /// The pod with this uid, if the root of the kubelet's files was given and the pod exists.
    pub fn pod(&self, uid: &str) -> Option<Pod> {
        let folder = self.kube_root.as_ref()?.join(PODS);
        fs::read_dir(folder).ok()?.flatten().find_map(|entry| {
            let name = entry.file_name();
            // Namespaces and names are DNS labels: they contain no underscore.
            let mut words = name.to_str()?.split('_');
            let pod = Pod { namespace: words.next()?.to_owned(), name: words.next()?.to_owned() };
            (words.next() == Some(uid) && words.next().is_none()).then_some(pod)
        })
    }

    fn list(&self) -> HashMap<String, String> {
        let mut names = HashMap::new();
        for path in STORED {
            let Ok(text) = fs::read(self.root.join(path)) else { continue };
            match serde_json::from_slice::<Vec<Stored>>(&text) {
                Ok(stored) => {
                    let found = stored.into_iter().filter_map(|mut one| Some((one.id, one.names.pop()?)));
                    names.extend(found);
                }
                Err(error) => log::info!("{path}: {error}"),
            }
        }
        for entry in fs::read_dir(self.root.join(DOCKER)).into_iter().flatten().flatten() {
            let Some(id) = entry.file_name().to_str().map(ToOwned::to_owned) else { continue };
            let Ok(text) = fs::read(entry.path().join("config.v2.json")) else { continue };
            match serde_json::from_slice::<Docker>(&text) {
                Ok(docker) => {
                    names.insert(id, docker.name.trim_start_matches('/').to_owned());
                }
                Err(error) => log::info!("{}: {error}", entry.path().display()),
            }
        }
        names
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names are found in the files of Podman and Docker; a broken file affects only its own names.
    #[test]
    fn containers() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write(STORED[0], r#"[{"id":"aa","names":["web"],"image":"x"},{"id":"bb"}]"#);
        write(STORED[2], "{broken");
        write(&format!("{DOCKER}/cc/config.v2.json"), r#"{"ID":"cc","Name":"/worker","State":{}}"#);
        write(&format!("{DOCKER}/dd/config.v2.json"), "");
        let mut names = Names::below(root.path(), None);
        let found = ["aa", "bb", "cc", "dd"].map(|id| names.container(id));
        assert_eq!(found, [Some("web".to_owned()), None, Some("worker".to_owned()), None]);
    }

    /// Pods get their names only from their own folders, and only if the root was given.
    #[test]
    fn pods() {
        let root = tempfile::tempdir().unwrap();
        for folder in ["shop_web-1_uid-1", "shop_web-2_uid-2", "uid-3", "a_b_c_uid-4"] {
            fs::create_dir_all(root.path().join(PODS).join(folder)).unwrap();
        }
        let names = Names::below(root.path(), Some(root.path().to_owned()));
        let pod = names.pod("uid-2").unwrap();
        assert_eq!((pod.namespace.as_str(), pod.name.as_str()), ("shop", "web-2"));
        assert_eq!((names.pod("uid-3"), names.pod("uid-4")), (None, None));
        assert_eq!(Names::below(root.path(), None).pod("uid-1"), None);
    }
}
