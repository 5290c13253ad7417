//! The user who called `sudo`: commands run as this user, and output files belong to this user.

use std::{ffi::OsString, fs, io, process::Command};

use rustix::{
    process::{Gid, Uid, geteuid},
    thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid},
};

use crate::export;

/// A user who is not root.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    /// User id.
    pub uid: u32,
    /// Id of the primary group.
    pub gid: u32,
    /// Ids of all groups.
    groups: Vec<u32>,
    name: String,
    home: Option<OsString>,
}

impl User {
    /// The user who called `sudo`, if that is how gctrace became root.
    ///
    /// # Errors
    ///
    /// The variables of `sudo` are set, but do not contain ids.
    pub fn of_sudo() -> Result<Option<Self>, String> {
        let variable = |name| std::env::var(name).ok();
        let Some(uid) = variable("SUDO_UID").filter(|_| geteuid().is_root()) else { return Ok(None) };
        let wrong = |what: &str| format!("{what} is set, but is not an id; unset it");
        let uid = id(&uid).ok_or_else(|| wrong("SUDO_UID"))?;
        let gid = id(&variable("SUDO_GID").unwrap_or_default()).ok_or_else(|| wrong("SUDO_GID"))?;
        if uid == 0 {
            return Ok(None);
        }
        let entry = fs::read_to_string("/etc/passwd").ok().and_then(|text| of_uid(&text, uid));
        // Users from a directory service are not in the file.
        let entry = entry.or_else(|| of_uid(&output("getent", &["passwd", &uid.to_string()])?, uid));
        let (name, home) = match entry {
            Some((name, home)) => (name, Some(OsString::from(home))),
            None => (variable("SUDO_USER").unwrap_or_else(|| uid.to_string()), None),
        };
        let groups = output("id", &["-G", "--", &name]).unwrap_or_default();
        let mut groups: Vec<u32> = groups.split_whitespace().filter_map(id).collect();
        if !groups.contains(&gid) {
            groups.push(gid);
        }
        Ok(Some(Self { uid, gid, groups, name, home }))
    }

    /// Sets the environment of a command to that of this user instead of root and `sudo`.
    pub fn adapt(&self, command: &mut Command) {
        for variable in ["SUDO_UID", "SUDO_GID", "SUDO_USER", "SUDO_COMMAND"] {
            command.env_remove(variable);
        }
        command.env("USER", &self.name).env("LOGNAME", &self.name);
        if let Some(home) = &self.home {
            command.env("HOME", home);
        }
    }

    /// Irrevocably switches the calling thread to this user. Other threads keep their credentials.
    ///
    /// # Errors
    ///
    /// The kernel refuses, for example because a capability is missing.
    pub fn become_on_this_thread(&self) -> io::Result<()> {
        let (uid, gid) = (Uid::from_raw(self.uid), Gid::from_raw(self.gid));
        let groups: Vec<Gid> = self.groups.iter().copied().map(Gid::from_raw).collect();
        set_thread_groups(&groups)?;
        set_thread_res_gid(gid, gid, gid)?;
        Ok(set_thread_res_uid(uid, uid, uid)?)
    }
}

/// Output files belong from now on to the user who called `sudo`, if there is one, and not `as_root`; `None`: the command has no `--as-root`.
///
/// # Errors
///
/// The variables of `sudo` are set, but do not contain ids.
pub fn own_files(as_root: Option<bool>) -> Result<Option<User>, String> {
    let user = match as_root {
        Some(true) => None,
        Some(false) => User::of_sudo().map_err(|wrong| format!("{wrong}, or use --as-root"))?,
        None => User::of_sudo()?,
    };
    if let Some(user) = &user {
        export::belong_to(user.uid, user.gid);
    }
    Ok(user)
}

/// The id of a user or group. The largest number is none: it means "no change" (`chown(2)`).
fn id(text: &str) -> Option<u32> {
    text.parse().ok().filter(|id| *id != u32::MAX)
}

/// The output of a program, if it exists and succeeds.
fn output(program: &str, args: &[&str]) -> Option<String> {
    // It runs as root, so PATH is not used.
    let output = ["/usr/bin", "/bin"]
        .iter()
        .find_map(|dir| Command::new(format!("{dir}/{program}")).args(args).output().ok())?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Name and home directory of a user, from lines in the format of passwd(5).
fn of_uid(passwd: &str, uid: u32) -> Option<(String, String)> {
    passwd.lines().find_map(|line| {
        let fields: Vec<&str> = line.split(':').collect();
        let [name, _, id, _, _, home, ..] = fields[..] else { return None };
        (id.parse() == Ok(uid)).then(|| (name.to_owned(), home.to_owned()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the kernel takes for "no id" is no id.
    #[test]
    fn ids() {
        assert_eq!(["0", "1000", "4294967294"].map(id), [Some(0), Some(1000), Some(u32::MAX - 1)]);
        for text in ["4294967295", "4294967296", "-1", "abc", ""] {
            assert_eq!(id(text), None, "{text}");
        }
    }

    /// Users are found by id; lines of other formats are skipped.
    #[test]
    fn passwd() {
        let text = "root:x:0:0:root:/root:/bin/sh\n+nis\nbroken:x\nana:x:1000:1000:A,,:/home/ana:/bin/zsh\n";
        assert_eq!(of_uid(text, 1000), Some(("ana".into(), "/home/ana".into())));
        assert_eq!(of_uid(text, 0), Some(("root".into(), "/root".into())));
        assert_eq!(of_uid(text, 1001), None);
    }
}
