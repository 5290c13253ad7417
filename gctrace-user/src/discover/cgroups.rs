//! Selected cgroups, given by path, by systemd unit, or by the id or name of a container.
//!
//! In the v2 hierarchy the kernel decides at each event, by the cgroup ids that are stored for it here; cgroups and containers that
//! are created later are noticed when their folder is created. If a cgroup is only in a v1 hierarchy, its processes are added to
//! the set of selected processes.

use std::{
    cell::Cell,
    collections::{HashMap, HashSet},
    ffi::OsStr,
    fs, io,
    mem::MaybeUninit,
    os::{
        fd::{AsFd as _, BorrowedFd, OwnedFd},
        unix::{ffi::OsStrExt as _, fs::MetadataExt as _},
    },
    path::{Component, Path, PathBuf},
    time::Duration,
};

use gctrace_common::config::MAX_CGROUP_LEVEL;
use procfs::process::Process;
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};

use super::selection::Selection;
use crate::{
    bpf::Probes,
    console::say,
    host::{
        container::{self, Cgroups},
        names::Names,
        proc_root,
    },
};

/// Interval at which the processes of cgroups in v1 hierarchies are listed. In between, the kernel follows forks.
const V1_INTERVAL: Duration = Duration::from_millis(100);
/// The same interval if `cgroup.procs` cannot show the host's pids, so that the cgroup of every process must be read.
const ASKING_INTERVAL: Duration = Duration::from_secs(1);

/// How a selected cgroup is identified.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Wanted {
    /// By this path below the root of its hierarchy.
    Path(PathBuf),
    /// By its container: a full id, a prefix of an id, or a name.
    Container(String),
    /// By its systemd unit: the last component of its path.
    Unit(String),
}

/// A mounted hierarchy.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Hierarchy {
    mounted: PathBuf,
    v2: bool,
}

/// A selected cgroup of the v2 hierarchy.
#[derive(Clone, Copy, Debug)]
struct Selected {
    id: u64,
}

/// Minimum number of digits of an id prefix; shorter strings are names.
const SHORTEST_ID: usize = 8;
const SHORT_ID: &str = " (as an id it is too short: give at least 8 digits)";

/// The selected cgroups.
pub(super) struct Groups {
    selection: Selection,
    wanted: Vec<Wanted>,
    hierarchies: Vec<Hierarchy>,
    names: Names,
    inotify: OwnedFd,
    /// Watched folders by watch descriptor: path, and whether the folder is in the v2 hierarchy.
    watched: HashMap<i32, (PathBuf, bool)>,
    /// Selected folders of the v2 hierarchy, including their descendants if the kernel cannot query ancestors.
    selected: HashMap<PathBuf, Selected>,
    /// Selected folders whose processes have not been inspected yet.
    new: Vec<PathBuf>,
    /// Selected folders of v1 hierarchies.
    v1: HashSet<PathBuf>,
    /// Processes in the v1 folders, as last listed.
    members: HashSet<u32>,
    /// Whether the kernel queries ancestors.
    ancestors: bool,
    /// Number of cgroups that could not be watched or selected.
    skipped: u32,
    /// Which of `wanted` these are, by index: they exist.
    refused: HashSet<usize>,
    /// Whether inotify events were lost.
    overflowed: Cell<bool>,
}

impl Groups {
    /// Starts tracking existing and future cgroups. `ancestors`: the kernel queries ancestors.
    pub(super) fn open(selection: &Selection, names: Names, ancestors: bool) -> Result<Self, String> {
        let hierarchies = hierarchies().map_err(|error| format!("reading /proc/self/mountinfo: {error}"))?;
        if hierarchies.is_empty() {
            return Err("no cgroup hierarchy is mounted, so --cgroup, --unit and --container select nothing: mount one, e.g. \
                        `mount -t cgroup2 none /sys/fs/cgroup`"
                .to_owned());
        }
        let Selection { cgroups, units, containers, .. } = selection;
        let paths = cgroups.iter().map(|path| Wanted::Path(below_root(path, &hierarchies)));
        let units = units.iter().map(|unit| Wanted::Unit(unit_name(unit)));
        let containers = containers.iter().cloned().map(Wanted::Container);
        let wanted = paths.chain(units).chain(containers).collect();
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)
            .map_err(|error| format!("watching cgroups (inotify_init): {error}"))?;
        let groups = Self {
            selection: selection.clone(),
            wanted,
            hierarchies,
            names,
            inotify,
            watched: HashMap::new(),
            selected: HashMap::new(),
            new: Vec::new(),
            v1: HashSet::new(),
            members: HashSet::new(),
            ancestors,
            skipped: 0,
            refused: HashSet::new(),
            overflowed: Cell::new(false),
        };
        Ok(groups)
    }

    /// Enters all existing cgroups. Selected ones that do not exist are reported: they may appear later.
    pub(super) fn begin(&mut self, probes: &mut Probes) -> Result<(), String> {
        for hierarchy in self.hierarchies.clone() {
            self.enter(&hierarchy.mounted, hierarchy.v2, probes)?;
        }
        // A scan of all processes follows.
        self.new.clear();
        for (index, wanted) in self.wanted.iter().enumerate() {
            let there = |path: &Path| self.matches_one(wanted, path);
            let there =
                self.selected.keys().any(|path| there(path)) || self.v1.iter().any(|path| there(path));
            match wanted {
                _ if there || self.refused.contains(&index) => {}
                Wanted::Path(path) => {
                    let places = self.hierarchies.iter().map(|hierarchy| hierarchy.mounted.to_string_lossy());
                    say(&format!(
                        "gctrace: there is no cgroup /{} now (looked in {}); it is traced when it is created",
                        path.display(),
                        places.collect::<Vec<_>>().join(", ")
                    ));
                }
                Wanted::Unit(name) => say(&format!(
                    "gctrace: the systemd unit {name} is not running; it is traced when it starts"
                )),
                Wanted::Container(name) => say(&format!(
                    "gctrace: no container with the id or name `{name}` is running; it is traced when it starts{}",
                    if is_short_id(name) { SHORT_ID } else { "" }
                )),
            }
        }
        Ok(())
    }

    /// A descriptor that is readable when a cgroup was created or removed.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.inotify.as_fd()
    }

    /// Interval at which processes must be listed; `None` if that is not needed.
    pub(super) fn interval(&self) -> Option<Duration> {
        let interval = if proc_root::shares_pids() { V1_INTERVAL } else { ASKING_INTERVAL };
        (!self.v1.is_empty()).then_some(interval)
    }

    /// Whether a process is in a selected cgroup now.
    pub(super) fn contains(&self, pid: u32) -> bool {
        self.is_below(
            pid,
            |folder, v2| {
                if v2 { self.selected.contains_key(folder) } else { self.v1.contains(folder) }
            },
        )
    }

    /// Whether `wanted` accepts the folder of a process's cgroup or of one of its ancestors (second argument: in the v2 hierarchy).
    fn is_below(&self, pid: u32, mut wanted: impl FnMut(&Path, bool) -> bool) -> bool {
        let Some(cgroups) = Cgroups::of(pid) else { return false };
        self.hierarchies.iter().any(|hierarchy| {
            let mut paths = cgroups.v1.iter().map(|(_, path)| path);
            let inside = |path: &String| {
                let folder = hierarchy.mounted.join(path.trim_start_matches('/'));
                folder.ancestors().any(|above| wanted(above, hierarchy.v2))
            };
            if hierarchy.v2 { cgroups.v2.iter().any(inside) } else { paths.any(inside) }
        })
    }

    /// The processes in these folders and below them.
    fn processes(&self, folders: &HashSet<PathBuf>) -> HashSet<u32> {
        if folders.is_empty() {
            return HashSet::new();
        }
        if proc_root::shares_pids() {
            return folders.iter().flat_map(|folder| processes_below(folder)).collect();
        }
        match proc_root::pids() {
            Ok(pids) => {
                pids.filter(|pid| self.is_below(*pid, |folder, _| folders.contains(folder))).collect()
            }
            Err(error) => {
                log::warn!("listing {}: {error}", proc_root::root().display());
                HashSet::new()
            }
        }
    }

    /// Handles created and removed cgroups. Returns newly selected processes that were not listed before.
    pub(super) fn take(&mut self, probes: &mut Probes) -> Result<Vec<u32>, String> {
        let events = self.events()?;
        if self.overflowed.take() {
            // Some selected cgroups may have been removed, or recreated under the same name.
            let is_new = |(folder, selected): (&PathBuf, &Selected)| {
                let there = fs::metadata(folder).is_ok_and(|data| data.ino() == selected.id);
                (!there).then(|| folder.clone())
            };
            let mut gone: Vec<PathBuf> = self.selected.iter().filter_map(is_new).collect();
            gone.extend(self.v1.iter().filter(|folder| !folder.exists()).cloned());
            for folder in gone {
                self.leave(&folder, probes);
            }
            // Adding a watch again has no effect.
            for hierarchy in self.hierarchies.clone() {
                self.enter_or_skip(&hierarchy.mounted, hierarchy.v2, probes);
            }
        }
        for (watch, name, gone) in events {
            let Some((folder, v2)) = self.watched.get(&watch).cloned() else { continue };
            let path = folder.join(name);
            if gone {
                self.leave(&path, probes);
            } else {
                self.enter_or_skip(&path, v2, probes);
            }
        }
        let new: HashSet<PathBuf> = std::mem::take(&mut self.new).into_iter().collect();
        let mut pids: Vec<u32> = self.processes(&new).into_iter().collect();
        pids.extend(self.list(probes)?);
        Ok(pids)
    }

    /// Lists the processes of selected cgroups in v1 hierarchies and passes them to the kernel. Returns the new ones.
    pub(super) fn list(&mut self, probes: &mut Probes) -> Result<Vec<u32>, String> {
        if self.v1.is_empty() && self.members.is_empty() {
            return Ok(Vec::new());
        }
        let now = self.processes(&self.v1);
        let parent = |pid| u32::try_from(proc_root::process(pid).ok()?.stat().ok()?.ppid).ok();
        for gone in self.members.difference(&now) {
            // What the user selects by a pid stays selected in any cgroup.
            if !self.selection.has_pid_of(*gone, parent) {
                probes.deselect(*gone);
            }
        }
        let new: Vec<u32> = now.difference(&self.members).copied().collect();
        for pid in &new {
            probes.select(*pid).map_err(|error| error.to_string())?;
        }
        self.members = now;
        Ok(new)
    }

    /// Handles a new mapping of a process: selects the process if it is in a cgroup whose processes are listed.
    pub(super) fn has_mapped(&mut self, pid: u32, probes: &mut Probes) -> Result<(), String> {
        if !self.v1.is_empty() && !self.members.contains(&pid) && self.contains(pid) {
            probes.select(pid).map_err(|error| error.to_string())?;
            self.members.insert(pid);
        }
        Ok(())
    }

    /// Enters a cgroup and its descendants, and watches them.
    fn enter(&mut self, folder: &Path, v2: bool, probes: &mut Probes) -> Result<(), String> {
        // Watch before listing: a cgroup created in between is seen twice, which does no harm.
        let flags = WatchFlags::CREATE | WatchFlags::DELETE | WatchFlags::ONLYDIR;
        match inotify::add_watch(&self.inotify, folder, flags) {
            Ok(watch) => {
                self.watched.insert(watch, (folder.to_owned(), v2));
            }
            // The cgroup has been removed meanwhile.
            Err(rustix::io::Errno::NOENT) => return Ok(()),
            Err(rustix::io::Errno::NOSPC) => {
                return Err(format!(
                    "watching the cgroup {}: no more inotify watches; raise fs.inotify.max_user_watches",
                    folder.display()
                ));
            }
            Err(error) => return Err(format!("watching the cgroup {}: {error}", folder.display())),
        }
        // Descendants that are wanted, too, have their own reason.
        let considered = self.consider(folder, v2, probes);
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                self.enter_or_skip(&entry.path(), v2, probes);
            }
        }
        considered
    }

    /// Like [`Groups::enter`], for cgroups that anybody may have created: one that cannot be watched or selected is skipped and reported.
    fn enter_or_skip(&mut self, folder: &Path, v2: bool, probes: &mut Probes) {
        /// Maximum number of reports to the user; further ones are only logged.
        const SAID: u32 = 20;
        let Err(reason) = self.enter(folder, v2, probes) else { return };
        let refused = self.wanted.iter().enumerate().filter(|(_, wanted)| self.matches_one(wanted, folder));
        let refused: Vec<usize> = refused.map(|(index, _)| index).collect();
        self.refused.extend(refused);
        self.skipped += 1;
        if self.skipped <= SAID {
            say(&format!("gctrace: a cgroup is skipped: {reason}"));
        } else {
            log::warn!("a cgroup is skipped: {reason}");
        }
    }

    fn consider(&mut self, folder: &Path, v2: bool, probes: &mut Probes) -> Result<(), String> {
        if self.selected.contains_key(folder) || self.v1.contains(folder) {
            return Ok(());
        }
        let inherits = !self.ancestors
            && v2
            && folder.ancestors().skip(1).any(|above| self.selected.contains_key(above));
        if !inherits && !self.matches(folder) {
            return Ok(());
        }
        if !v2 {
            // The same container may be in several hierarchies; in v2 the kernel selects it.
            let known = self
                .selected
                .keys()
                .any(|other| below(&self.hierarchies, other) == below(&self.hierarchies, folder));
            if !known {
                self.v1.insert(folder.to_owned());
            }
            return Ok(());
        }
        let Ok(metadata) = fs::metadata(folder) else { return Ok(()) };
        let level = below(&self.hierarchies, folder).map_or(0, |path| path.components().count()) as u32;
        if level > MAX_CGROUP_LEVEL {
            return Err(format!(
                "the cgroup {} is more than {MAX_CGROUP_LEVEL} levels deep; select one above it",
                folder.display()
            ));
        }
        let id = metadata.ino();
        probes.select_cgroup(id, level).map_err(|error| error.to_string())?;
        log::info!("the cgroup {} is selected", folder.display());
        // It may have been entered in a v1 hierarchy first.
        let (hierarchies, below) = (&self.hierarchies, below(&self.hierarchies, folder));
        self.v1.retain(|other| self::below(hierarchies, other) != below);
        self.selected.insert(folder.to_owned(), Selected { id });
        self.new.push(folder.to_owned());
        Ok(())
    }

    fn leave(&mut self, folder: &Path, probes: &mut Probes) {
        if let Some(selected) = self.selected.remove(folder) {
            probes.deselect_cgroup(selected.id);
        }
        self.v1.remove(folder);
        self.watched.retain(|_, (path, _)| path != folder);
    }

    fn matches(&mut self, folder: &Path) -> bool {
        // Names are only looked up if one is selected.
        if let Some(id) = container_of(folder) {
            let _cached = self.names.container(&id);
        }
        let wanted = std::mem::take(&mut self.wanted);
        let found = wanted.iter().any(|wanted| self.matches_one(wanted, folder));
        self.wanted = wanted;
        found
    }

    fn matches_one(&self, wanted: &Wanted, folder: &Path) -> bool {
        match wanted {
            Wanted::Path(path) => below(&self.hierarchies, folder) == Some(path.as_path()),
            Wanted::Unit(unit) => folder.file_name() == Some(OsStr::new(unit)),
            Wanted::Container(text) => container_of(folder).is_some_and(|id| {
                is_id(text) && id.starts_with(text.as_str()) || self.names.known(&id) == Some(text.as_str())
            }),
        }
    }

    fn events(&self) -> Result<Vec<(i32, PathBuf, bool)>, String> {
        let mut buffer = [MaybeUninit::uninit(); 16 << 10];
        let mut reader = inotify::Reader::new(&self.inotify, &mut buffer);
        let mut events = Vec::new();
        loop {
            match reader.next() {
                Ok(event) => {
                    let flags = event.events();
                    if flags.contains(ReadFlags::QUEUE_OVERFLOW) {
                        log::info!("changes of cgroups were lost; all are looked at again");
                        self.overflowed.set(true);
                    }
                    let Some(name) = event.file_name().filter(|_| flags.contains(ReadFlags::ISDIR)) else {
                        continue;
                    };
                    let name = PathBuf::from(OsStr::from_bytes(name.to_bytes()));
                    events.push((event.wd(), name, flags.contains(ReadFlags::DELETE)));
                }
                Err(rustix::io::Errno::AGAIN) => return Ok(events),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(format!("watching cgroups: {error}")),
            }
        }
    }
}

/// The processes that are in the selected cgroups now.
pub(super) fn members(selection: &Selection) -> Result<HashSet<u32>, String> {
    let mut groups = Groups::open(selection, Names::below(&proc_root::file_root(), None), false)?;
    let mut folders = HashSet::new();
    let pids = proc_root::pids();
    for pid in pids.map_err(|error| format!("listing {}: {error}", proc_root::root().display()))? {
        groups.is_below(pid, |folder, _| {
            if !folders.contains(folder) {
                folders.insert(folder.to_owned());
            }
            false
        });
    }
    folders.retain(|folder| groups.matches(folder));
    Ok(groups.processes(&folders))
}

/// The container that this cgroup belongs to: the last component of the path contains its id.
fn container_of(folder: &Path) -> Option<String> {
    container::parse(&Path::new("/").join(folder.file_name()?).to_string_lossy()).id
}

/// The path of a folder below the root of its hierarchy.
fn below<'a>(hierarchies: &[Hierarchy], folder: &'a Path) -> Option<&'a Path> {
    // One hierarchy may be mounted inside another (`/sys/fs/cgroup/unified`).
    let roots = hierarchies.iter().filter_map(|hierarchy| folder.strip_prefix(&hierarchy.mounted).ok());
    roots.min_by_key(|path| path.as_os_str().len())
}

/// Whether there are hierarchies in which the kernel cannot select (v1).
pub fn lists_cgroups() -> bool {
    hierarchies().is_ok_and(|found| found.iter().any(|hierarchy| !hierarchy.v2))
}

/// The folder of a process's v2 cgroup. The root cgroup is refused: it may contain all processes of the host.
pub(super) fn folder_of(pid: u32) -> Result<PathBuf, String> {
    let path = Cgroups::of(pid).and_then(|cgroups| cgroups.v2).ok_or("it is in no cgroup of version 2")?;
    if path == "/" {
        return Err("it is in the root cgroup, to which packets of all other programs belong, too (a systemd unit or a container \
                    has one of its own)"
            .to_owned());
    }
    let hierarchies = hierarchies().map_err(|error| format!("reading /proc/self/mountinfo: {error}"))?;
    let root = hierarchies
        .into_iter()
        .find(|hierarchy| hierarchy.v2)
        .ok_or("no cgroup hierarchy of version 2 is mounted")?;
    let below = Path::new(&path).strip_prefix("/").unwrap_or(Path::new(&path));
    if below.components().any(|part| part == Component::ParentDir) {
        return Err(format!("its cgroup {path} is outside of what gctrace sees"));
    }
    Ok(root.mounted.join(below))
}

/// The name of a unit's cgroup: a name without a type means a service, as in systemctl.
fn unit_name(unit: &str) -> String {
    const TYPES: [&str; 3] = [".service", ".scope", ".slice"];
    if TYPES.iter().any(|kind| unit.ends_with(kind)) { unit.to_owned() } else { format!("{unit}.service") }
}

fn is_id(text: &str) -> bool {
    text.len() >= SHORTEST_ID && has_digits_only(text)
}

/// Whether a text may be meant as an id, but is too short for one.
fn is_short_id(text: &str) -> bool {
    text.len() < SHORTEST_ID && has_digits_only(text)
}

fn has_digits_only(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

/// A path from the user, below the root of its hierarchy: given as a folder in a mounted hierarchy, or as in `/proc/PID/cgroup`. Where
/// each hierarchy is mounted in a folder of `/sys/fs/cgroup`, paths below this folder, and the folder itself, are meant as if one were mounted on it.
fn below_root(path: &Path, hierarchies: &[Hierarchy]) -> PathBuf {
    let plain = || ["/sys/fs/cgroup", "/"].iter().find_map(|root| path.strip_prefix(root).ok());
    below(hierarchies, path).or_else(plain).unwrap_or(path).components().collect()
}

/// The mounted hierarchies, v2 first.
fn hierarchies() -> Result<Vec<Hierarchy>, procfs::ProcError> {
    let mut found: Vec<Hierarchy> = Vec::new();
    for mount in Process::myself()?.mountinfo()? {
        let v2 = mount.fs_type == "cgroup2";
        // A mounted subtree of a hierarchy would give other paths.
        if (v2 || mount.fs_type == "cgroup") && mount.root == "/" {
            found.push(Hierarchy { mounted: mount.mount_point, v2 });
        }
    }
    found.sort_by_key(|hierarchy| !hierarchy.v2);
    // Keep one mount of each hierarchy, even if v1 hierarchies are mounted twice.
    found.dedup_by(|a, b| a.mounted == b.mounted || (a.v2 && b.v2));
    Ok(found)
}

/// The processes in a cgroup and its descendants. Cgroups removed meanwhile are skipped.
fn processes_below(folder: &Path) -> Vec<u32> {
    let read = |path: &Path| -> io::Result<Vec<u32>> {
        let text = fs::read_to_string(path.join("cgroup.procs"))?;
        // 0 is a process that does not exist in our pid namespace.
        Ok(text.lines().filter_map(|line| line.parse().ok()).filter(|pid| *pid != 0).collect())
    };
    let mut pids = read(folder).unwrap_or_default();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            pids.extend(processes_below(&entry.path()));
        }
    }
    pids
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A path may be given as a folder of any hierarchy or as in `/proc/PID/cgroup`.
    #[test]
    fn paths() {
        let hierarchy = |mounted: &str, v2| Hierarchy { mounted: mounted.into(), v2 };
        let hybrid = [hierarchy("/sys/fs/cgroup/unified", true), hierarchy("/sys/fs/cgroup/pids", false)];
        for path in [
            "/sys/fs/cgroup/unified/system.slice/puma.service",
            "/sys/fs/cgroup/pids/system.slice/puma.service/",
            "/system.slice/puma.service",
            "system.slice/puma.service",
        ] {
            assert_eq!(
                below_root(Path::new(path), &hybrid),
                Path::new("system.slice/puma.service"),
                "{path}"
            );
        }
        for root in ["/", "/sys/fs/cgroup", "/sys/fs/cgroup/", "/sys/fs/cgroup/unified"] {
            assert_eq!(below_root(Path::new(root), &hybrid), Path::new(""), "{root}");
        }
        assert_eq!(below_root(Path::new("/sys/fs/cgroup/a.slice"), &hybrid), Path::new("a.slice"));
        assert_eq!(below_root(Path::new("/sys/fs/cgroups"), &hybrid), Path::new("sys/fs/cgroups"));
        let pure = [hierarchy("/sys/fs/cgroup", true)];
        assert_eq!(below_root(Path::new("/sys/fs/cgroup"), &pure), Path::new(""));
    }

    /// A unit without a type is a service.
    #[test]
    fn units() {
        for (given, expected) in [
            ("puma", "puma.service"),
            ("puma.service", "puma.service"),
            ("shop@1.2", "shop@1.2.service"),
            ("session-3.scope", "session-3.scope"),
            ("app.slice", "app.slice"),
        ] {
            assert_eq!(unit_name(given), expected);
        }
    }

    /// Short ids are treated as ids; words that look similar are names.
    #[test]
    fn ids() {
        assert!(is_id("3f4b8d3e5c6a") && is_id("deadbeef"));
        assert!(!is_id("cafe") && !is_id("web-1") && !is_id("DEADBEEF"));
        assert!(is_short_id("96bdcc9") && !is_short_id("96bdcc91") && !is_short_id("web-1"));
        assert!(SHORT_ID.contains(&format!("at least {SHORTEST_ID} digits")));
    }
}
