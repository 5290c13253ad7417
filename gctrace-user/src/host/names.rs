//! Names of containers and pods, from the files in which runtimes and the kubelet store them. No socket is queried.

use std::{
    collections::HashMap,
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use serde::Deserialize;

use super::container::Cgroups;
use crate::model::Container;

/// Minimum interval between lookups of a container without a name.
const FRESH: Duration = Duration::from_secs(1);
/// Maximum number of remembered names from Docker.
const REMEMBERED: usize = 4096;

/// Looks names up.
#[derive(Debug)]
pub struct Names {
    root: PathBuf,
    kube_root: Option<PathBuf>,
    lists: [List; STORED.len()],
    docker: HashMap<String, Named>,
    missing: HashMap<String, Instant>,
}

/// The names in one list of containers/storage.
#[derive(Debug, Default)]
struct List {
    /// State of the file when it was read; `None`: there was none.
    read: Option<FileState>,
    names: HashMap<String, String>,
}

/// Inode, size and times of a file: they differ once it has been changed.
type FileState = (u64, u64, [i64; 4]);

/// The name of one of Docker's containers.
#[derive(Debug)]
struct Named {
    /// State of its file when the name was read.
    read: FileState,
    name: String,
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
        Self {
            root: root.to_owned(),
            kube_root,
            lists: Default::default(),
            docker: HashMap::new(),
            missing: HashMap::new(),
        }
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

    /// The name of a container, if its runtime stores one in a file. Anybody who may create cgroups can make up ids: one that is unknown costs a few
    /// attempts to open a file, however many containers there are.
    pub fn container(&mut self, id: &str) -> Option<String> {
        if let Some(named) = self.docker.get(id) {
            // `docker rename`. The last processes of a container that was removed keep its name.
            if state(&self.docker_file(id)).is_ok_and(|now| now != named.read)
                && let Some(named) = self.of_docker(id)
            {
                self.docker.insert(id.to_owned(), named);
            }
        } else if self.known(id).is_none()
            && self.missing.get(id).is_none_or(|looked| looked.elapsed() >= FRESH)
        {
            for (list, path) in self.lists.iter_mut().zip(STORED) {
                list.refresh(&self.root.join(path));
            }
            if let Some(named) = self.of_docker(id) {
                if self.docker.len() >= REMEMBERED {
                    self.docker.clear();
                }
                self.docker.insert(id.to_owned(), named);
            }
            self.missing.retain(|_, looked| looked.elapsed() < FRESH);
            self.missing.insert(id.to_owned(), Instant::now());
        }
        self.known(id).map(ToOwned::to_owned)
    }

    /// Like [`Names::container`], without a new lookup.
    pub fn known(&self, id: &str) -> Option<&str> {
        let of_docker = self.docker.get(id).map(|named| &named.name);
        let listed = || self.lists.iter().rev().find_map(|list| list.names.get(id));
        of_docker.or_else(listed).map(String::as_str)
    }

    /// The name of one of Docker's containers.
    fn of_docker(&self, id: &str) -> Option<Named> {
        if !id.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
            return None;
        }
        let path = self.docker_file(id);
        // First: if the file changes meanwhile, it is read again.
        let read = state(&path).ok()?;
        let text = fs::read(&path).ok()?;
        let docker = serde_json::from_slice::<Docker>(&text);
        let docker = docker.inspect_err(|error| log::info!("{}: {error}", path.display())).ok()?;
        Some(Named { read, name: docker.name.trim_start_matches('/').to_owned() })
    }

    fn docker_file(&self, id: &str) -> PathBuf {
        self.root.join(DOCKER).join(id).join("config.v2.json")
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
}

impl List {
    /// Reads the file again if it has changed. Returns whether it was read.
    fn refresh(&mut self, path: &Path) -> bool {
        self.refresh_by(path, |path| fs::read(path))
    }

    /// Like [`List::refresh`]. After an error, such as a lack of descriptors, the names stay and the next call reads the file.
    fn refresh_by(&mut self, path: &Path, read: impl FnOnce(&Path) -> io::Result<Vec<u8>>) -> bool {
        let is_gone = |error: &io::Error| error.kind() == io::ErrorKind::NotFound;
        let now = match state(path) {
            Ok(now) => Some(now),
            Err(error) if is_gone(&error) => None,
            Err(_) => return false,
        };
        if now == self.read {
            return false;
        }
        let text = match now.map_or_else(|| Ok(b"[]".to_vec()), |_| read(path)) {
            Ok(text) => text,
            Err(error) => {
                log::info!("{}: {error}", path.display());
                return false;
            }
        };
        self.read = now;
        self.names.clear();
        match serde_json::from_slice::<Vec<Stored>>(&text) {
            Ok(stored) => {
                let found = stored.into_iter().filter_map(|mut one| Some((one.id, one.names.pop()?)));
                self.names.extend(found);
            }
            Err(error) => log::info!("{}: {error}", path.display()),
        }
        true
    }
}

fn state(path: &Path) -> io::Result<FileState> {
    let file = fs::metadata(path)?;
    let times = [file.mtime(), file.mtime_nsec(), file.ctime(), file.ctime_nsec()];
    Ok((file.ino(), file.size(), times))
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

    /// Unknown ids make nobody read the lists again, which may be long, nor the files of other containers. A container that appears is found at once,
    /// and one without a name a second later.
    #[test]
    fn unknown_ids() {
        let root = tempfile::tempdir().unwrap();
        let list = root.path().join(STORED[1]);
        fs::create_dir_all(list.parent().unwrap()).unwrap();
        fs::write(&list, r#"[{"id":"aa","names":["web"]}]"#).unwrap();
        let mut names = Names::below(root.path(), None);
        assert_eq!(names.container("aa").as_deref(), Some("web"));
        for id in 0..100 {
            let id = format!("unknown{id}");
            assert_eq!((names.container(&id), names.lists[1].refresh(&list)), (None, false));
        }
        let docker = root.path().join(DOCKER).join("cc");
        fs::create_dir_all(&docker).unwrap();
        fs::write(docker.join("config.v2.json"), r#"{"Name":"/worker"}"#).unwrap();
        assert_eq!(names.container("cc").as_deref(), Some("worker"));
        fs::write(&list, r#"[{"id":"aa","names":["web"]},{"id":"bb","names":["jobs"]}]"#).unwrap();
        assert_eq!((names.container("bb").as_deref(), names.known("aa")), (Some("jobs"), Some("web")));
        assert_eq!(names.container("../cc"), None);
        fs::remove_file(&list).unwrap();
        assert_eq!(
            (names.container("dd"), names.known("aa"), names.known("cc")),
            (None, None, Some("worker"))
        );
    }

    /// A container of Docker's that is renamed has its new name at once, and the old one while its file is broken or gone.
    #[test]
    fn renamed() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join(DOCKER).join("cc").join("config.v2.json");
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        let mut names = Names::below(root.path(), None);
        for (text, name) in [
            (r#"{"Name":"/worker"}"#, "worker"),
            (r#"{"Name":"/jobs"}"#, "jobs"),
            ("{", "jobs"),
            (r#"{"Name":"/again"}"#, "again"),
        ] {
            fs::write(&file, text).unwrap();
            assert_eq!(names.container("cc").as_deref(), Some(name));
        }
        fs::remove_file(&file).unwrap();
        assert_eq!(names.container("cc").as_deref(), Some("again"));
    }

    /// If a list cannot be read, the names stay, and it is read as soon as it can be.
    #[test]
    fn lists_that_fail() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = &*file.path().to_owned();
        let mut list = List::default();
        let name = |list: &List| list.names.get("aa").cloned();
        fs::write(path, r#"[{"id":"aa","names":["web"]}]"#).unwrap();
        assert!(list.refresh(path));
        fs::write(path, r#"[{"id":"aa","names":["jobs"]}]"#).unwrap();
        assert!(!list.refresh_by(path, |_| Err(io::Error::from_raw_os_error(libc::EMFILE))));
        assert_eq!(name(&list).as_deref(), Some("web"));
        assert!(list.refresh(path) && !list.refresh(path));
        assert_eq!(name(&list).as_deref(), Some("jobs"));
        drop(file);
        assert!(list.refresh(path) && list.names.is_empty());
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
