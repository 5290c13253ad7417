//! Selection: the first thing every GC program does.

use aya_ebpf::{
    EbpfContext as _,
    helpers::{
        bpf_get_attach_cookie, bpf_get_current_cgroup_id, generated::bpf_get_current_ancestor_cgroup_id,
    },
    programs::ProbeContext,
};
use gctrace_common::{
    config::{
        Config, ImageConfig, MAX_CGROUP_LEVEL, ProcessEntry, SELECT_ALL, SELECT_CGROUP_IDS, SELECT_CGROUPS,
        SELECT_LISTED,
    },
    cookie::{Cookie, NO_REGISTER},
    stats::Counter,
};

use crate::{
    line::debug_line,
    maps::{self, CGROUP_LEVELS, CGROUPS, NO_EXIST, PROCESSES, config, count},
    rubies, usermem,
};

/// A hit that passed selection.
pub struct Admitted {
    pub tgid: u32,
    pub tid: u32,
    pub image_index: u32,
    pub image: &'static ImageConfig,
    /// Load bias: run-time minus stated addresses.
    pub bias: u64,
    /// Stated address of the probed instruction.
    pub site: u64,
    /// Objspace pointer from the site's register, or 0.
    pub register: u64,
    /// Register field of the cookie.
    pub field: u8,
    pub process: *mut ProcessEntry,
}

impl Admitted {
    /// The base of the VM's addresses: the load bias, or for a GC library the base of the Ruby that has loaded it.
    #[inline(always)]
    pub fn vm_base(&self) -> Option<u64> {
        match self.image.anchor {
            0 => Some(self.bias),
            anchor => usermem::read(self.bias.wrapping_add(anchor)),
        }
    }

    /// `(*ruby_current_vm_ptr)->objspace`.
    #[inline(always)]
    pub fn objspace(&self) -> Option<u64> {
        let vm: u64 = usermem::read(self.vm_base()?.wrapping_add(self.image.vm_ptr))?;
        let objspace: u64 = usermem::read(vm.wrapping_add(u64::from(self.image.vm_objspace)))?;
        if objspace == 0 { None } else { Some(objspace) }
    }
}

/// Thread group id and thread id of the current task. (Aya's `EbpfContext::pid()` is the thread id.)
#[inline(always)]
pub fn tgid_tid() -> (u32, u32) {
    let raw = aya_ebpf::helpers::bpf_get_current_pid_tgid();
    ((raw >> 32) as u32, raw as u32)
}

/// The entry of a selected process and its flags, or the counter of a hit that is not admitted.
#[inline(always)]
pub fn selected(tgid: u32) -> Result<(*mut ProcessEntry, u32), Counter> {
    let config = config();
    if tgid == config.own_tgid {
        return Err(Counter::SelfHits);
    }
    // A process in a selected cgroup needs no entry yet.
    let free = config.select == SELECT_ALL || in_selected_cgroup(&config);
    if !free && config.select & SELECT_LISTED == 0 {
        return Err(Counter::Filtered);
    }
    // If only listed processes are selected, an unknown process was not selected; otherwise the map was full.
    let unknown = if free { Counter::NoImage } else { Counter::Filtered };
    let process = process_entry(tgid, free).ok_or(unknown)?;
    // SAFETY: a map value pointer, valid while the program runs.
    let flags = unsafe { (*process).flags };
    if !free && flags & ProcessEntry::SELECTED == 0 {
        return Err(Counter::Filtered);
    }
    Ok((process, flags))
}

/// Whether the current process, which runs a known image, is still selected: it may have left its cgroup since.
#[inline(always)]
pub fn still_selected(tgid: u32) -> bool {
    let config = config();
    if config.select == SELECT_ALL || in_selected_cgroup(&config) {
        return true;
    }
    // SAFETY: a map value pointer, valid while the program runs.
    config.select & SELECT_LISTED != 0
        && PROCESSES
            .get_ptr(&tgid)
            .is_some_and(|entry| unsafe { (*entry).flags } & ProcessEntry::SELECTED != 0)
}

/// Whether the current process is in a selected cgroup. Costs one lookup per level on which a cgroup is selected.
#[inline(always)]
fn in_selected_cgroup(config: &Config) -> bool {
    if config.select & SELECT_CGROUP_IDS != 0 {
        // SAFETY: a plain helper call.
        return is_selected_cgroup(unsafe { bpf_get_current_cgroup_id() });
    }
    if config.select & SELECT_CGROUPS == 0 {
        return false;
    }
    let levels = CGROUP_LEVELS.get(0).copied().unwrap_or(0);
    let mut level = 0;
    while level <= MAX_CGROUP_LEVEL {
        // SAFETY: a plain helper call. A level that the process's cgroup does not have gives 0.
        if levels >> level & 1 != 0
            && is_selected_cgroup(unsafe { bpf_get_current_ancestor_cgroup_id(level as i32) })
        {
            return true;
        }
        level += 1;
    }
    false
}

#[inline(always)]
fn is_selected_cgroup(id: u64) -> bool {
    CGROUPS.get_ptr(&id).is_some()
}

/// Records that a process, whose flags are given, runs an image.
#[inline(always)]
pub fn note_image(tgid: u32, process: *mut ProcessEntry, flags: u32, image: u32, bias: u64) {
    if flags & ProcessEntry::RUBY == 0 {
        // SAFETY: a map value pointer, valid while the program runs; only this bit is ever set here, so a lost race with
        // another thread changes nothing.
        unsafe { (*process).flags = flags | ProcessEntry::RUBY };
        rubies::add(tgid, image, bias);
    }
}

/// Checks the selection, finds the image, and counts the outcome of the hit. `Err`: the counter of a hit that is not admitted.
#[inline(always)]
pub fn admit(ctx: &ProbeContext) -> Result<Admitted, Counter> {
    count(Counter::Hits);
    let config = config();
    let (tgid, tid) = tgid_tid();
    let (process, flags) = match selected(tgid) {
        Ok(found) => found,
        Err(counter) => {
            count(counter);
            return Err(counter);
        }
    };
    let ip = usermem::instruction_pointer(ctx);
    let (image_index, bias, site, register, field) = if config.has_cookie != 0 {
        // SAFETY: a plain helper call with the program's own context.
        let cookie = Cookie::unpack(unsafe { bpf_get_attach_cookie(ctx.as_ptr()) });
        let register =
            if cookie.register == NO_REGISTER { 0 } else { usermem::register(ctx, cookie.register) };
        (u32::from(cookie.image), ip.wrapping_sub(cookie.address), cookie.address, register, cookie.register)
    } else {
        if flags & ProcessEntry::IMAGE_KNOWN == 0 {
            count(Counter::NoImage);
            return Err(Counter::NoImage);
        }
        // SAFETY: a map value pointer, valid while the program runs.
        let (image, bias) = unsafe { ((*process).image, (*process).bias) };
        (image, bias, ip.wrapping_sub(bias), 0, NO_REGISTER)
    };
    let Some(image) = maps::image(image_index) else {
        debug_line!(ctx, "tgid {} hits a probe of the image {}, which is not open", tgid, image_index);
        count(Counter::NoImage);
        return Err(Counter::NoImage);
    };
    count(Counter::Admitted);
    note_image(tgid, process, flags, image_index, bias);
    Ok(Admitted { tgid, tid, image_index, image, bias, site, register, field, process })
}

#[inline(always)]
fn process_entry(tgid: u32, create: bool) -> Option<*mut ProcessEntry> {
    if let Some(entry) = PROCESSES.get_ptr_mut(&tgid) {
        return Some(entry);
    }
    if !create {
        return None;
    }
    // Another thread may have been faster; its entry must stay.
    let _lost_race = PROCESSES.insert(&tgid, &ProcessEntry::default(), NO_EXIST);
    let entry = PROCESSES.get_ptr_mut(&tgid);
    if entry.is_none() {
        count(Counter::ProcessMapFull);
    }
    entry
}
