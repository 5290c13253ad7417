//! Two questions of a user who has never used gctrace, answered only with the commands of the README.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::child::Guarded;
use gctrace_tests::gctrace::Invocation;
use gctrace_tests::live::{Live, gctrace_binary, marked_lines, rubies_dir};
use gctrace_tests::ruby::Ruby;
use gctrace_tests::{PATIENCE, ensure_times};

const README: &str = include_str!("../../README.md");
/// Maximum time from the question to the answer, from installing gctrace on, including the 30 s for which the command watches.
const AT_MOST: Duration = Duration::from_mins(1);

/// The output of a command of the README for a program of `tests/rubies`. The README watches for 30 s, the test for 5 s. gctrace is a new copy,
/// and has never seen this Ruby.
fn answer(live: &Live, ruby: &Ruby, program: &str, command: &str) -> Result<String> {
    ensure!(README.lines().any(|line| line.trim_end().starts_with(command)), "the README has no `{command}`");
    let mut running =
        Guarded::start(program, ruby.command()?.arg(rubies_dir().join(program).with_extension("rb")))?;
    running.wait_stdout(PATIENCE, "ready", |line| line.starts_with("ready"))?;
    let command = command.strip_prefix("sudo gctrace ").context("no command of gctrace")?;
    let command = command.replace("4242", &running.pid().to_string()).replace("30s", "5s");
    let home = tempfile::tempdir_in(live.dir("newcomer")?)?;
    let (binary, cache) = (home.path().join("gctrace"), home.path().join("cache"));
    let began = Instant::now();
    std::fs::copy(gctrace_binary()?, &binary)?;
    let invocation = Invocation::of(&binary, command.split(' '));
    let finished = invocation
        .with(|command| {
            command.arg("--cache-dir").arg(&cache);
        })
        .run()?;
    let took = began.elapsed() + Duration::from_secs(25);
    ensure!(finished.status.success(), "{}", finished.errors());
    ensure!(cache.read_dir()?.next().is_some(), "an older cache was used");
    ensure_times!(took < AT_MOST, "{took:?}");
    Ok(finished.stdout.join("\n"))
}

/// "Which line triggers the longest GC pause?"
#[test]
fn which_line_triggers_the_longest_pause() -> Result<()> {
    let live = Live::beside_others()?;
    let triggers = marked_lines("newcomer_pauses.rb", "triggers")?[0];
    Ruby::first_and_last(|ruby| {
        let said = answer(&live, ruby, "newcomer_pauses", "sudo gctrace --pid 4242 --duration 30s")?;
        let worst = said.lines().skip_while(|line| !line.trim_start().starts_with("worst ")).nth(1);
        let worst = worst.with_context(|| said.clone())?;
        ensure!(worst.ends_with(&format!("newcomer_pauses.rb:{triggers}")), "{worst}\n{said}");
        ensure!(worst.contains("Order#lines"), "{worst}");
        Ok(())
    })
}

/// "Which thread blocks the others?"
#[test]
fn which_thread_blocks_the_others() -> Result<()> {
    let live = Live::beside_others()?;
    Ruby::first_and_last(|ruby| {
        let said = answer(&live, ruby, "newcomer_blocks", "sudo gctrace --pid 4242 --duration 30s --gvl")?;
        let blocks = said.lines().find(|line| line.contains(" waited ") && line.contains(" while "));
        let blocks = blocks.with_context(|| said.clone())?;
        ensure!(blocks.contains(" web ") && blocks.contains(" importer held the GVL"), "{blocks}\n{said}");
        Ok(())
    })
}
