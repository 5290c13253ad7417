//! `gctrace heap --diff`, `--every` and `--leaks`: what grows, and what holds it.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use gctrace_tests::PATIENCE;
use gctrace_tests::child::Finished;
use gctrace_tests::gctrace::Invocation;
use gctrace_tests::heap::heap;
use gctrace_tests::live::{Live, marked_lines};
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::{Running, Script};
use gctrace_tests::witness::malloc_extension;
use serde_json::{Value, json};

/// The growth between two censuses is what the program created: from two files, against the process, and while it is watched.
#[test]
fn growth() -> Result<()> {
    let live = Live::beside_others()?;
    let ruby = Ruby::main()?;
    let mut script = Script::unwitnessed(&live, &ruby, "heap_grow.rb")?.start()?;
    script.wait_for("ready")?;
    let save = |script: &Running, name: &str| -> Result<String> {
        let finished = heap(&live, script.pid(), &["--by", "class", "--format", "jsonl"])?;
        let file = live.path(name);
        std::fs::write(&file, finished.stdout.join("\n"))?;
        Ok(file.to_string_lossy().into_owned())
    };
    let lines = |finished: &Finished| -> Result<Vec<Value>> {
        ensure!(finished.status.success(), "{}", finished.errors());
        Ok(finished.stdout.iter().map(|line| serde_json::from_str(line)).collect::<Result<_, _>>()?)
    };
    let orders = |lines: &[Value]| -> Option<(u64, u64)> {
        let row = lines.iter().find(|line| line["name"] == "Order")?;
        row["count_before"].as_u64().zip(row["count"].as_u64())
    };
    let none = save(&script, "none.jsonl")?;
    script.say("1000")?;
    script.wait_for("grown")?;
    let some = save(&script, "some.jsonl")?;
    let both = Invocation::new(["heap", "--diff", &none, &some, "--format", "jsonl"])?.run()?;
    ensure!(orders(&lines(&both)?) == Some((0, 1000)), "{:?}", both.stdout);
    let unchanged = Invocation::new(["heap", "--diff", &some, &some])?.run()?;
    ensure!(unchanged.stdout.iter().any(|line| line == "nothing has changed"), "{:?}", unchanged.stdout);

    script.say("500")?;
    script.wait_for("grown")?;
    let now = heap(&live, script.pid(), &["--diff", &some, "--format", "jsonl"])?;
    ensure!(orders(&lines(&now)?) == Some((1000, 1500)), "{:?}", now.stdout);

    let pid = script.pid().to_string();
    let cache = live.path("cache").to_string_lossy().into_owned();
    let watch = ["heap", "--pid", &pid, "--by", "class", "--every", "200ms", "--format", "jsonl"];
    let mut gctrace = Invocation::new(watch.into_iter().chain(["--cache-dir", &cache]))?.start()?;
    // The program has been counted once another growth is seen, in whichever census that is.
    let mut told = 0;
    let since = Instant::now();
    while told == 0 {
        ensure!(since.elapsed() < PATIENCE, "no growth of Order is told: {:?}", gctrace.stdout_so_far());
        script.say("10")?;
        script.wait_for("grown")?;
        std::thread::sleep(Duration::from_millis(50));
        told = gctrace.stdout_so_far().iter().filter(|line| line.contains(r#""name":"Order""#)).count();
        ensure!(gctrace.running()?, "it has ended");
    }
    script.say("end")?;
    script.finish()?;
    let watched = gctrace.wait()?;
    let said = |line: &str| line.starts_with("gctrace: pid ") && line.contains("has ended");
    ensure!(watched.errors().lines().any(said), "{}", watched.errors());
    let growths = lines(&watched)?;
    let more = |line: &Value, what: &str| line[what].as_u64() > line[format!("{what}_before")].as_u64();
    ensure!(
        growths.iter().all(|line| line["type"] == "growth" && (more(line, "count") || more(line, "bytes")))
    );
    Ok(())
}

/// Minimum number of censuses for a verdict: what grows must grow by more than the number of the program's other objects of the same
/// class may vary. Each census is of a different round of the program.
const CENSUSES: u64 = 8;

/// The first line and the classes of `--leaks`. If the machine is too slow for the program to run that many rounds, or for the heap
/// to be read in time, the program is watched again for twice the time.
pub(super) fn leaks(live: &Live, pid: u32) -> Result<(Value, Vec<Value>)> {
    let mut seen = Vec::new();
    for time in ["4s", "8s", "16s", "40s"] {
        let (head, found) = leaks_in(live, pid, time, &[])?;
        let read = found.iter().take(5).all(|line| line["end"].is_string() && line["end"] != "unread");
        if head["censuses"].as_u64().is_some_and(|censuses| censuses >= CENSUSES) && read {
            return Ok((head, found));
        }
        seen.push((head, found));
    }
    bail!("watched in vain: {seen:#?}")
}

/// Like [`leaks`], for exactly this time.
fn leaks_in(live: &Live, pid: u32, time: &str, more: &[&str]) -> Result<(Value, Vec<Value>)> {
    let flags: Vec<&str> = ["--leaks", time, "--format", "jsonl"].iter().chain(more).copied().collect();
    let watched = heap(live, pid, &flags)?;
    ensure!(watched.status.success(), "{}", watched.errors());
    // The holders of all classes are searched for at once.
    let searches = watched.errors().matches("looking for what holds").count();
    let growth = watched.stdout.iter().any(|line| line.contains(r#""type":"leak""#));
    ensure!(searches == usize::from(growth), "{}", watched.errors());
    let lines: Vec<Value> =
        watched.stdout.iter().map(|line| serde_json::from_str(line)).collect::<Result<_, _>>()?;
    let (head, found) = lines.split_first().context("no line")?;
    ensure!(head["type"] == "leaks" && found.iter().all(|line| line["type"] == "leak"), "{lines:?}");
    Ok((head.clone(), found.to_vec()))
}

/// The line of a class that grows. Checks that it grew, the class of its direct holder (empty: no class), and that it was allocated by the
/// marked lines of the program only, however many objects were in the same slots before, and was sampled often enough.
pub(super) fn suspect<'a>(found: &'a [Value], class: &str, holder: &str) -> Result<&'a Value> {
    let leak = found.iter().find(|line| line["name"] == class);
    let leak = leak.with_context(|| format!("{class} is not named: {found:#?}"))?;
    ensure!(leak["old"].as_u64() > leak["old_before"].as_u64(), "{leak}");
    ensure!(leak["holders"][0]["class"].as_str().unwrap_or_default() == holder, "{leak}");
    let marked = marked_lines("heap_leaks.rb", &format!("allocates {class}"))?;
    let sites = leak["sites"].as_array().with_context(|| format!("no sites: {leak}"))?;
    ensure!(!sites.is_empty(), "no sampled object is left: {leak}");
    for site in sites {
        let here = site["file"].as_str().is_some_and(|file| file.ends_with("rubies/heap_leaks.rb"));
        let line = site["line"].as_u64().is_some_and(|line| marked.contains(&line));
        ensure!(here && line && site["survivors"].as_u64() > Some(0), "not by {marked:?}: {leak}");
    }
    // The same objects by the number of major collections that they have survived, which is at least two.
    let generations = leak["generations"].as_array().with_context(|| format!("no generations: {leak}"))?;
    let sum = |rows: &[Value]| rows.iter().filter_map(|row| row["survivors"].as_u64()).sum::<u64>();
    ensure!(sum(generations) == sum(sites), "{leak}");
    ensure!(generations.iter().all(|row| row["survived"].as_u64() >= Some(2)), "{leak}");
    Ok(leak)
}

/// Checks the account of the followed objects: each one is accounted for, and their stacks arrived.
fn accounted(head: &Value) -> Result<()> {
    let of = |name: &str| head["allocations"][name].as_u64().with_context(|| format!("no {name} in {head}"));
    ensure!(head["allocations"]["adds_up"] == true && of("unread")? == 0, "{head}");
    ensure!(of("drawn")? == of("followed")? + of("page_full")? + of("map_full")? + of("not_free")?, "{head}");
    ensure!(of("followed")? == of("freed")? + of("gone")? + of("left")?, "{head}");
    ensure!(of("stacks_lost")? == 0 && of("not_free")? == 0 && of("hits")? >= of("drawn")?, "{head}");
    Ok(())
}

/// Everything that grows in one program on this Ruby is found, with what holds it and where it is allocated.
fn all_found(live: &Live, ruby: &Ruby) -> Result<()> {
    let mut script = Script::unwitnessed(live, ruby, "heap_leaks.rb")?.arg("all").start()?;
    script.wait_for("ready")?;
    let (head, found) = leaks(live, script.pid())?;
    script.say("end")?;
    script.finish()?;
    ensure!(head["verdict"] == "growth", "{head}");
    accounted(&head)?;
    let constants = [
        ("Order", "Array", "CACHE"),
        ("Proc", "Array", "CLOSURES"),
        ("String", "Hash", "Shop::Names::BY_ID"),
    ];
    for (class, holder, constant) in constants {
        let leak = suspect(&found, class, holder)?;
        ensure!(leak["constant"] == constant && leak["end"] == "constant", "{leak}");
    }
    let leak = suspect(&found, "Item", "Array")?;
    let code = leak["holders"][1]["code"].as_str().with_context(|| format!("no closure: {leak}"))?;
    ensure!(code.starts_with("counter ") || code.starts_with("Object#counter "), "{code}");
    ensure!(code.contains("rubies/heap_leaks.rb:"), "{code}");
    // The closure is a lambda held by a constant.
    let lambda = &leak["holders"][2];
    ensure!(lambda["class"] == "Proc" && leak["constant"] == "COUNTER", "{leak}");
    let code = lambda["code"].as_str().with_context(|| format!("no code: {leak}"))?;
    let marked = marked_lines("heap_leaks.rb", "allocates Item")?;
    ensure!(code.starts_with("block in ") && at_line(code, &marked), "not at {marked:?}: {code}");
    Ok(())
}

/// Whether the code is at one of these lines of the program.
fn at_line(code: &str, lines: &[u64]) -> bool {
    lines.iter().any(|line| code.ends_with(&format!("rubies/heap_leaks.rb:{line}")))
}

/// Objects held by variables of classes and modules, by a constant of a singleton class, and by a lambda with its own variable.
fn of_classes(live: &Live, ruby: &Ruby) -> Result<()> {
    let mut script = Script::unwitnessed(live, ruby, "heap_leaks.rb")?.arg("classes").start()?;
    script.wait_for("ready")?;
    let (_, found) = leaks(live, script.pid())?;
    script.say("end")?;
    script.finish()?;
    let variables = [
        ("Shop::Basket", json!({"name": "@@open", "class": "Shop::Basket"})),
        ("Coupon", json!({"name": "@coupons", "class": "Shop::Desk"})),
        // A class that is named after a constant.
        ("Stamp", json!({"name": "@stamps", "class": "NAMELESS"})),
    ];
    for (class, variable) in variables {
        let leak = suspect(&found, class, "Array")?;
        ensure!(leak["variable"] == variable && leak["end"] == "class_variable", "{leak}");
        ensure!(
            leak["holders"].as_array().map(Vec::len) == Some(1) && leak.get("constant").is_none(),
            "{leak}"
        );
    }
    let leak = suspect(&found, "Coin", "Array")?;
    ensure!(leak["constant"] == "Shop::Vault.singleton_class::COINS", "{leak}");
    // A lambda with an instance variable: before 4.0, something other than the lambda itself also records what it holds.
    let leak = suspect(&found, "Wish", "Array")?;
    let holders = leak["holders"].as_array().map(Vec::len);
    if ruby.is_at_least(4, 0) {
        let lambda = &leak["holders"][2];
        ensure!(lambda["class"] == "Proc" && leak["constant"] == "Wishes::KEEPER", "{leak}");
        let lines = marked_lines("heap_leaks.rb", "allocates Wish")?;
        let code = lambda["code"].as_str().with_context(|| format!("no code: {leak}"))?;
        ensure!(holders == Some(3) && at_line(code, &lines), "not at {lines:?}: {leak}");
    } else {
        ensure!(holders == Some(2) && leak["end"] == "not_readable", "{leak}");
    }
    Ok(())
}

/// The pid of a program, and what grows in it.
pub(super) fn growing(live: &Live, ruby: &Ruby, program: &str) -> Result<(u32, Vec<Value>)> {
    let mut script = Script::unwitnessed(live, ruby, "heap_leaks.rb")?.arg(program).start()?;
    script.wait_for("ready")?;
    let pid = script.pid();
    let (_, found) = leaks(live, pid)?;
    script.say("end")?;
    script.finish()?;
    Ok((pid, found))
}

/// Objects held by global variables and by threads.
fn of_threads(live: &Live, ruby: &Ruby) -> Result<()> {
    let (pid, found) = growing(live, ruby, "globals")?;
    let leak = ending(&found, "Parcel", "global_variable")?;
    ensure!(leak["global"] == "$parcels", "{leak}");
    let main = |name: &str| json!({"name": name, "tid": pid, "thread": null, "main": true, "fiber": false});
    let leak = ending(&found, "Session", "thread_local")?;
    ensure!(leak["thread_local"] == main("sessions"), "{leak}");
    let leak = ending(&found, "Guest", "thread_variable")?;
    ensure!(leak["thread_variable"] == main("guests"), "{leak}");
    let leak = ending(&found, "Sale", "thread_local")?;
    let local = &leak["thread_local"];
    ensure!(local["name"] == "sales" && local["thread"] == "clerk 1" && local["main"] == false, "{leak}");
    ensure!(local["tid"].as_u64().is_some_and(|tid| tid != u64::from(pid)), "{leak}");
    Ok(())
}

/// Objects held by fibers, and by instance variables of threads, which are not thread variables.
fn of_fibers(live: &Live, ruby: &Ruby) -> Result<()> {
    let (pid, found) = growing(live, ruby, "fibers")?;
    let leak = ending(&found, "Draft", "thread_local")?;
    let expected = json!({"name": "drafts", "tid": pid, "thread": null, "main": true, "fiber": true});
    ensure!(leak["thread_local"] == expected, "{leak}");
    if ruby.is_at_least(3, 2) {
        let leak = ending(&found, "Memo", "fiber_storage")?;
        let storage = &leak["fiber_storage"];
        ensure!(storage["name"] == "memos" && storage["tid"] == pid && storage["fiber"] == false, "{leak}");
    }
    // Up to 3.1, only the class of the thread records which of several instance variables holds them.
    let named = ruby.is_at_least(3, 2);
    let leak = ending(&found, "Refund", if named { "thread_variable" } else { "not_readable" })?;
    ensure!(!named || leak["thread_variable"]["name"] == "refunds", "{leak}");
    let tip = suspect(&found, "Tip", "Array")?;
    ensure!(tip["holders"][1]["class"] == "Hash" && tip["end"] == "not_readable", "{tip}");
    Ok(())
}

/// Checks that an array is held in this way, and that no other holder is reported.
fn ending<'a>(found: &'a [Value], class: &str, end: &str) -> Result<&'a Value> {
    let leak = suspect(found, class, "Array")?;
    ensure!(leak["end"] == end, "{leak}");
    let named = ["constant", "variable", "global", "thread_local", "thread_variable", "fiber_storage"];
    let named = named.iter().filter(|name| leak.get(**name).is_some()).count();
    let holders = leak["holders"].as_array().map(Vec::len);
    ensure!(end == "not_readable" || (named == 1 && holders == Some(1)), "{leak}");
    ensure!(end != "not_readable" || named == 0, "{leak}");
    Ok(leak)
}

/// Objects held by lambdas: one object each, or one lambda that holds all of them. And objects that hold one object each.
fn of_lambdas(live: &Live, ruby: &Ruby) -> Result<()> {
    let mut script = Script::unwitnessed(live, ruby, "heap_leaks.rb")?.arg("lambdas").start()?;
    script.wait_for("ready")?;
    let (_, found) = leaks(live, script.pid())?;
    script.say("end")?;
    script.finish()?;
    let lambdas = marked_lines("heap_leaks.rb", "allocates Proc")?;
    let code = |leak: &Value, at: usize| -> Result<String> {
        let code = leak["holders"][at]["code"].as_str();
        Ok(code.with_context(|| format!("no code of {at}: {leak}"))?.to_owned())
    };
    let classes = |leak: &Value| -> Vec<Value> {
        let holders = leak["holders"].as_array().into_iter().flatten();
        holders.map(|holder| holder["class"].clone()).collect()
    };

    let proc = suspect(&found, "Proc", "Array")?;
    ensure!(classes(proc) == ["Array", "Feed"], "{proc}");
    let main = json!({"name": "@main", "class": "Feed"});
    ensure!(proc["variable"] == main && proc["end"] == "class_variable", "{proc}");

    let ticket = suspect(&found, "Ticket", "")?;
    ensure!(classes(ticket) == [Value::Null, "Proc".into(), "Array".into(), "Feed".into()], "{ticket}");
    ensure!(ticket["variable"] == main, "{ticket}");
    each_its_own(&ticket["holders"][0])?;
    each_its_own(&ticket["holders"][1])?;
    let (variables, lambda) = (code(ticket, 0)?, code(ticket, 1)?);
    ensure!(variables.starts_with("block in ") && variables.contains("subscribe "), "{ticket}");
    ensure!(lambda.contains("subscribe ") && at_line(&lambda, &lambdas), "not {lambdas:?}: {lambda}");

    let own = suspect(&found, "Line", "Parent")?;
    each_its_own(&own["holders"][0])?;
    ensure!(classes(own) == ["Parent", "Array"] && own["constant"] == "PARENTS", "{own}");

    // An array, the variables of the method, those of the block in it, the lambda.
    let vote = suspect(&found, "Vote", "Array")?;
    ensure!(classes(vote) == ["Array".into(), Value::Null, Value::Null, "Proc".into()], "{vote}");
    ensure!(vote["variable"] == json!({"name": "@@count", "class": "Tally"}), "{vote}");
    let lines = marked_lines("heap_leaks.rb", "allocates Vote")?;
    ensure!(at_line(&code(vote, 3)?, &lines), "not {lines:?}: {vote}");
    Ok(())
}

/// Checks that most samples have their own holder, and that these holders are alike.
fn each_its_own(holder: &Value) -> Result<()> {
    let of = |name: &str| holder[name].as_u64().with_context(|| format!("no {name}: {holder}"));
    ensure!(of("holds")? * 2 > of("of")? && of("of")? > 1 && of("objects")? >= of("holds")?, "{holder}");
    Ok(())
}

/// Listeners of an object, and objects held by a thread.
fn others_found(live: &Live, ruby: &Ruby) -> Result<()> {
    let mut script = Script::unwitnessed(live, ruby, "heap_leaks.rb")?.arg("others").start()?;
    script.wait_for("ready")?;
    let (head, found) = leaks(live, script.pid())?;
    script.say("end")?;
    script.finish()?;
    accounted(&head)?;
    let leak = suspect(&found, "Listener", "Array")?;
    ensure!(leak["holders"][1]["class"] == "Bus" && leak["constant"] == "BUS", "{leak}");
    let leak = suspect(&found, "Session", "Array")?;
    ensure!(leak["thread_local"]["name"] == "sessions" && leak["end"] == "thread_local", "{leak}");
    // Only `self` in a block refers to each object.
    let leak = suspect(&found, "Waiter", "Alarm")?;
    each_its_own(&leak["holders"][0])?;
    let code = leak["holders"][0]["code"].as_str().with_context(|| format!("no code: {leak}"))?;
    let marked = marked_lines("heap_leaks.rb", "allocates Alarm")?;
    ensure!(code.starts_with("block in ") && at_line(code, &marked), "not at {marked:?}: {code}");
    ensure!(leak["holders"][1]["class"] == "Array" && leak["constant"] == "ALARMS", "{leak}");
    Ok(())
}

/// Nothing is reported about a program that keeps nothing.
fn nothing_found(live: &Live, ruby: &Ruby, program: &str) -> Result<()> {
    let mut script = Script::unwitnessed(live, ruby, "heap_leaks.rb")?.arg(program).start()?;
    script.wait_for("ready")?;
    let (head, found) = leaks(live, script.pid())?;
    script.say("end")?;
    script.finish()?;
    ensure!(head["verdict"] == "no_leak" && found.is_empty(), "{program}: {head} {found:#?}");
    ensure!(head["fragmented"] == false && head.get("rss").is_none(), "{program}: {head}");
    accounted(&head)
}

/// An extension that keeps memory: no class of objects grows, but the process does, at the site that `gctrace malloc` finds.
fn memory_outside(live: &Live, ruby: &Ruby) -> Result<()> {
    let script = Script::unwitnessed(live, ruby, "heap_leaks.rb")?.arg("extension");
    let mut script = script.env("GCTRACE_TEST_MALLOC_WITNESS", malloc_extension(ruby)?).start()?;
    script.wait_for("ready")?;
    let (head, found) = leaks(live, script.pid())?;
    let (pid, cache) = (script.pid().to_string(), live.path("cache").to_string_lossy().into_owned());
    // At the pace at which it was watched, some rounds of the program.
    let round =
        head["seconds"].as_f64().zip(head["censuses"].as_f64()).map(|(seconds, count)| seconds / count);
    let time = format!("{:.0}s", (round.context("no round")? * 3.0).ceil().max(2.0));
    let args = ["malloc", "--pid", &pid, "--duration", &time, "--format", "jsonl", "--cache-dir", &cache];
    let counted = Invocation::new(args)?.run()?;
    script.say("end")?;
    script.finish()?;
    ensure!(head["verdict"] == "no_leak" && found.is_empty(), "{head} {found:#?}");
    let of = |name: &str| head[name].as_u64().with_context(|| format!("no {name}: {head}"));
    // 5 MB in each of at least eight rounds, while the pages of objects stay constant.
    ensure!(of("rss")? > of("rss_before")? + (20 << 20), "{head}");
    ensure!(of("heap_bytes")? <= of("heap_bytes_before")? + (1 << 20), "{head}");
    ensure!(counted.status.success(), "{}", counted.errors());
    let lines: Vec<Value> =
        counted.stdout.iter().map(|line| serde_json::from_str(line)).collect::<Result<_, _>>()?;
    let place = lines.iter().filter(|line| line["type"] == "malloc_site");
    let place = place.max_by_key(|line| line["left"]["bytes"].as_f64().unwrap_or(0.0) as u64);
    let library = place.and_then(|place| place["library"].as_str()).unwrap_or_default();
    ensure!(library.contains("malloc_witness"), "{place:?}");
    Ok(())
}

/// A heap that few objects keep large is no leak, and is reported as fragmented.
fn fragmented(live: &Live, ruby: &Ruby) -> Result<()> {
    let mut script = Script::unwitnessed(live, ruby, "heap_leaks.rb")?.arg("sparse").start()?;
    script.wait_for("ready")?;
    let (head, found) = leaks(live, script.pid())?;
    script.say("end")?;
    script.finish()?;
    ensure!(head["verdict"] == "no_leak" && found.is_empty(), "{head} {found:#?}");
    ensure!(head["fragmented"] == true, "{head}");
    accounted(&head)
}

/// Programs that keep more and more objects: in an array of a constant, in closures, as listeners, in a thread, in an extension; one whose heap
/// is fragmented; and three that are stable. Each gets the right verdict: what grows, what holds it, and the lines that allocate it. The first
/// program runs on every Ruby. All run at once, because most of the time is spent waiting.
#[test]
fn what_grows_and_what_holds_it() -> Result<()> {
    let live = Live::beside_others()?;
    let rubies = Ruby::all()?;
    let mut failures = Vec::new();
    let live = &live;
    std::thread::scope(|scope| {
        let mut running: Vec<_> =
            rubies.iter().map(|ruby| (ruby, "all", scope.spawn(move || all_found(live, ruby)))).collect();
        // Each of the other programs runs on one Ruby.
        let mut turns = rubies.iter().cycle();
        for program in ["stable", "queue", "recent"] {
            let Some(ruby) = turns.next() else { continue };
            running.push((ruby, program, scope.spawn(move || nothing_found(live, ruby, program))));
        }
        if let Some(ruby) = turns.next() {
            running.push((ruby, "others", scope.spawn(move || others_found(live, ruby))));
        }
        if let Some(ruby) = turns.next() {
            running.push((ruby, "extension", scope.spawn(move || memory_outside(live, ruby))));
        }
        if let Some(ruby) = turns.next() {
            running.push((ruby, "sparse", scope.spawn(move || fragmented(live, ruby))));
        }
        for (ruby, program, thread) in running {
            if let Err(error) = thread.join().expect("a thread panicked") {
                failures.push(format!("{program}, Ruby {} ({}): {error:?}", ruby.version(), ruby.label()));
            }
        }
    });
    ensure!(failures.is_empty(), "{} fail.\n{}", failures.len(), failures.join("\n"));
    Ok(())
}

/// Variables of classes and modules, and Procs, are reported as holders on every Ruby.
#[test]
fn variables_of_classes_and_procs() -> Result<()> {
    let live = Live::beside_others()?;
    two_on_each(&live, [("classes", of_classes), ("lambdas", of_lambdas)])
}

/// Global variables, thread locals and thread variables are reported as holders on every Ruby.
#[test]
fn global_variables_and_threads() -> Result<()> {
    let live = Live::beside_others()?;
    two_on_each(&live, [("globals", of_threads), ("fibers", of_fibers)])
}

/// A program's name, and the function that checks it.
pub(super) type Compared = (&'static str, fn(&Live, &Ruby) -> Result<()>);

/// Runs four programs at once: each is read often, and more of them would only wait for a CPU.
pub(super) fn two_on_each(live: &Live, programs: [Compared; 2]) -> Result<()> {
    let rubies = Ruby::all()?;
    let mut failures = Vec::new();
    for rubies in rubies.chunks(2) {
        std::thread::scope(|scope| {
            let running: Vec<_> = rubies
                .iter()
                .flat_map(|ruby| {
                    programs.map(|(name, compare)| (ruby, name, scope.spawn(move || compare(live, ruby))))
                })
                .collect();
            for (ruby, program, thread) in running {
                if let Err(error) = thread.join().expect("a thread panicked") {
                    let (version, label) = (ruby.version(), ruby.label());
                    failures.push(format!("{program}, Ruby {version} ({label}): {error:?}"));
                }
            }
        });
    }
    ensure!(failures.is_empty(), "{} fail.\n{}", failures.len(), failures.join("\n"));
    Ok(())
}

/// Nothing is reported about a program that never collects. With `--no-sites` objects are not followed, and the reason is given.
#[test]
fn what_is_not_known() -> Result<()> {
    let live = Live::beside_others()?;
    let ruby = Ruby::main()?;
    let mut idle = Script::unwitnessed(&live, &ruby, "heap_leaks.rb")?.arg("idle").start()?;
    idle.wait_for("ready")?;
    for more in [&[][..], &["--no-sites"]] {
        let (head, found) = leaks_in(&live, idle.pid(), "200ms", more)?;
        ensure!(head["verdict"] == "too_few_majors" && found.is_empty(), "{head} {found:#?}");
        ensure!(head["no_sites"].is_string() != more.is_empty(), "{head}");
        ensure!(head["allocations"].is_object() == more.is_empty(), "{head}");
    }
    idle.say("end")?;
    idle.finish()?;
    Ok(())
}

/// Ctrl-C ends a watch with a report of what was seen until then.
#[test]
fn a_watch_that_is_interrupted() -> Result<()> {
    let live = Live::beside_others()?;
    let mut script = Script::unwitnessed(&live, &Ruby::main()?, "heap_leaks.rb")?.arg("classes").start()?;
    script.wait_for("ready")?;
    let (pid, cache) = (script.pid().to_string(), live.path("cache").to_string_lossy().into_owned());
    let args = ["heap", "--pid", &pid, "--cache-dir", &cache, "--leaks", "1h", "--no-sites"];
    for format in ["text", "jsonl"] {
        let mut gctrace = Invocation::new(args.into_iter().chain(["--format", format]))?.start()?;
        gctrace.wait_error("watching the objects")?;
        std::thread::sleep(Duration::from_secs(3));
        let finished = gctrace.interrupt()?;
        ensure!(finished.status.success(), "{}", finished.errors());
        let first = finished.stdout.first().context("no line")?;
        if format == "text" {
            let all = finished.stdout.join("\n");
            ensure!(all.contains("ended by a signal after") && all.contains("major GC"), "{all}");
        } else {
            let head: Value = serde_json::from_str(first)?;
            ensure!(head["ended_by"] == "signal" && head["ended"] == false, "{head}");
            ensure!(head["majors"].as_u64() > Some(0) && head["seconds"].as_f64() > Some(2.4), "{head}");
        }
    }
    script.say("end")?;
    script.finish()?;
    Ok(())
}

/// If a program is replaced (exec), each watch ends, with success.
#[test]
fn replaced_between_counts() -> Result<()> {
    let live = Live::beside_others()?;
    let cache = live.path("cache").to_string_lossy().into_owned();
    for by in ["class", "memory"] {
        let mut script = Script::unwitnessed(&live, &Ruby::main()?, "replaced.rb")?.start()?;
        script.wait_for("ready")?;
        let pid = script.pid().to_string();
        let args = ["heap", "--pid", &pid, "--cache-dir", &cache, "--by", by, "--every", "300ms"];
        let mut gctrace = Invocation::new(args)?.start()?;
        let counted = if by == "class" { "GC #" } else { "shared with other processes" };
        let since = Instant::now();
        while !gctrace.stdout_so_far().iter().any(|line| line.contains(counted)) {
            ensure!(since.elapsed() < PATIENCE && gctrace.running()?, "{by}: it does not count");
            std::thread::sleep(Duration::from_millis(20));
        }
        script.say("now")?;
        script.wait_for("replaced")?;
        let finished = gctrace.wait()?;
        let errors = finished.errors();
        ensure!(finished.status.success(), "{by}: {errors}");
        ensure!(errors.contains("has replaced its program") && !errors.contains("trying again"), "{errors}");
        script.say("end")?;
        script.finish()?;
    }
    Ok(())
}

/// A program that is replaced has ended, and its last counts are not mistaken for those at a GC.
#[test]
fn a_program_that_is_replaced() -> Result<()> {
    let live = Live::beside_others()?;
    let mut script = Script::unwitnessed(&live, &Ruby::main()?, "replaced.rb")?.start()?;
    script.wait_for("ready")?;
    let (pid, cache) = (script.pid().to_string(), live.path("cache").to_string_lossy().into_owned());
    let flags = ["--leaks", "1m", "--no-sites", "--format", "jsonl"];
    let args = ["heap", "--pid", &pid, "--cache-dir", &cache].into_iter().chain(flags);
    let mut gctrace = Invocation::new(args)?.start()?;
    gctrace.wait_error("watching the objects")?;
    std::thread::sleep(Duration::from_secs(1));
    script.say("now")?;
    script.wait_for("replaced")?;
    let since = Instant::now();
    let finished = gctrace.wait()?;
    ensure!(since.elapsed() < Duration::from_secs(30), "it watched on");
    ensure!(finished.status.success(), "{}", finished.errors());
    let head: Value = serde_json::from_str(finished.stdout.first().context("no line")?)?;
    ensure!(
        head["ended"] == true && head["ended_by"] == "program" && head["majors"].as_u64() > Some(0),
        "{head}"
    );
    ensure!(head["discarded"].as_u64() < Some(500), "{head}");
    script.say("end")?;
    script.finish()?;
    Ok(())
}
