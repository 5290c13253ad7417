//! Pages for people: applications, and the cost of garbage collection in each of them, by environment and by process.

use std::collections::{BTreeMap, BTreeSet};

use gctrace_pages::{
    Column, Head, chart, encoded, lines, page, page_with, settings, table,
    words::{ago, bytes, count, counted, percent, since},
};
use hyper::{StatusCode, header};
use maud::{Markup, html};

use super::{
    Shared,
    access::{self, Refusal, Sight},
    answer::Answer,
    now,
    recommended::{self, recommended},
};
use crate::{
    digest::{BOUNDS, CLASSES, Figures},
    printable::printable_part,
    store::{AppInfo, BATCH, MAX_SLOTS, Slot, StoreError, TokenHash},
    tune::Series,
};

mod compare;
mod history;
mod seen;

use seen::{Latest, Seen};

/// Number of columns of a chart.
const COLUMNS: usize = 72;
/// Maximum number of rows in a table of processes.
const MAX_PROCESSES: usize = 200;
/// Maximum number of environments shown.
const MAX_ENVIRONMENTS: usize = 50;
/// Maximum number of characters shown of a name from outside, and of an environment.
const MAX_NAME: usize = 300;
/// The name of the cookie that holds a token.
const COOKIE: &str = "gctrace";
/// Names of the classes of time in GC per cycle.
const CLASS_NAMES: [&str; CLASSES] = [
    "< 1 ms",
    "1–2 ms",
    "2–5 ms",
    "5–10 ms",
    "10–20 ms",
    "20–50 ms",
    "50–100 ms",
    "0.1–0.2 s",
    "0.2–0.5 s",
    "≥ 0.5 s",
];

/// The visitor of a page.
#[derive(Debug)]
pub(super) enum Visitor {
    /// A user on this host, where no sign-in is needed.
    Local,
    /// A user with a token.
    Token(TokenHash),
    /// Any other user.
    Unknown,
}

/// Whether a request comes from this host: the collector listens on loopback, the request names loopback as its host (a page from
/// elsewhere could use another name), and no proxy forwarded it.
pub(super) fn is_local(shared: &Shared, headers: &header::HeaderMap) -> bool {
    if !shared.options.listen.ip().is_loopback() || shared.options.public_url.is_some() {
        return false;
    }
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    let name = host.rsplit_once(':').filter(|(_, port)| port.bytes().all(|byte| byte.is_ascii_digit()));
    let name = name.map_or(host, |(name, _)| name);
    let local = ["localhost", "[::1]"].contains(&name)
        || name.parse::<std::net::Ipv4Addr>().is_ok_and(|address| address.is_loopback());
    let proxied =
        ["forwarded", "via", "x-forwarded-for", "x-real-ip"].iter().any(|name| headers.contains_key(*name));
    local && !proxied
}

/// Whether a browser sent the request on behalf of another site's page. In secure contexts browsers say so themselves; otherwise the
/// page's origin must be this host, or that of `--public-url`, since a proxy may have changed the host.
pub(super) fn is_foreign(public_url: Option<&str>, headers: &header::HeaderMap) -> bool {
    let text = |name: &str| headers.get(name).map(|value| value.to_str().unwrap_or("?"));
    if let Some(site) = text("sec-fetch-site") {
        return !["same-origin", "none"].contains(&site);
    }
    let host = text("host").unwrap_or_default();
    let same = |origin: &str| {
        let public = public_url.and_then(|url| url.split_at_checked(origin.len()));
        origin.split_once("://").is_some_and(|(_, origin)| origin.eq_ignore_ascii_case(host))
            || public.is_some_and(|(begin, path)| {
                begin.eq_ignore_ascii_case(origin) && (path.is_empty() || path.starts_with('/'))
            })
    };
    text("origin").is_some_and(|origin| !same(origin))
}

impl Visitor {
    /// Identifies the visitor by the headers of a request. Visitors on this host need no sign-in.
    pub(super) fn of(shared: &Shared, headers: &header::HeaderMap, scheme: &str) -> Self {
        if is_local(shared, headers) {
            return Self::Local;
        }
        let name = cookie_name(scheme);
        let cookies = headers.get_all(header::COOKIE).iter().filter_map(|value| value.to_str().ok());
        let mut pairs = cookies.flat_map(|line| line.split("; ")).filter_map(|pair| pair.split_once('='));
        pairs
            .find(|(key, _)| *key == name)
            .map_or(Self::Unknown, |(_, token)| Self::Token(TokenHash::of(token)))
    }

    /// The applications that this visitor may see. `Err` for others: the message beside the sign-in form, if they sent a token.
    fn sees(&self, shared: &Shared) -> Result<Result<Vec<AppInfo>, Option<&'static str>>, StoreError> {
        let sight = match self {
            Self::Local => Sight::All,
            Self::Unknown => return Ok(Err(None)),
            Self::Token(token) => match access::reads(shared, *token)? {
                Ok(sight) => sight,
                Err(refusal) => return Ok(Err(Some(refusal.text()))),
            },
        };
        let mut apps = shared.store.apps()?;
        apps.retain(|info| sight.sees(info));
        apps.sort_by_key(AppInfo::order);
        Ok(Ok(apps))
    }
}

/// The name of the cookie. Over TLS it has a prefix that makes browsers accept the cookie only from this host.
fn cookie_name(scheme: &str) -> String {
    if scheme == "https" { format!("__Host-{COOKIE}") } else { COOKIE.to_owned() }
}

/// Whether a page with this path may exist.
pub(super) fn is_page(path: &str) -> bool {
    path == "/" || path.starts_with("/app/")
}

/// Builds a page.
pub(super) fn show(
    shared: &Shared,
    visitor: &Visitor,
    path: &str,
    query: &str,
) -> Result<Answer, StoreError> {
    let seen = match visitor.sees(shared)? {
        Ok(seen) => seen,
        Err(refusal) => return Ok(form(refusal)),
    };
    let head =
        Head { sign_out: matches!(visitor, Visitor::Token(_)).then_some("/sign-in"), ..Head::default() };
    let Some(number) = path.strip_prefix("/app/") else { return Ok(list(head, &seen)) };
    let Some(info) = seen.iter().find(|info| info.app.0.to_string() == number) else {
        let content = html! { p { "There is no such application, or your token is for another one." } };
        return Ok(Answer::page(StatusCode::NOT_FOUND, page_with(head, "Not found", &above(), &content)));
    };
    let mut wanted = Wanted { days: 1, ..Wanted::default() };
    let (mut by, mut pair) = (None, [None, None]);
    for (key, value) in form_urlencoded::parse(query.as_bytes()) {
        match &*key {
            "days" => wanted.days = value.parse().unwrap_or(1).clamp(1, 365),
            "env" => wanted.environment = Some(value.into_owned()),
            "host" => wanted.host = Some(value.into_owned()),
            "pid" => wanted.pid = value.parse().ok(),
            "ruby" => wanted.ruby = Series::parse(&value),
            "compare" => by = Some(value),
            "a" => pair[0] = Some(value.into_owned()),
            "b" => pair[1] = Some(value.into_owned()),
            _ => {}
        }
    }
    if let (Some(by), [Some(one), Some(other)]) = (by, pair) {
        wanted.compared = compare::Pair::parse(&by, one, other);
    }
    application(shared, head, info, &info.title(&seen), &wanted)
}

fn above() -> Vec<gctrace_pages::Link<'static>> {
    vec![("/".to_owned(), "Applications")]
}

/// Signs in with a token; an empty one signs out.
pub(super) fn sign_in(shared: &Shared, token: &str, scheme: &str) -> Result<Answer, StoreError> {
    let name = cookie_name(scheme);
    let secure = if scheme == "https" { "; Secure" } else { "" };
    let attributes = format!("Path=/; HttpOnly; SameSite=Strict{secure}");
    if token.is_empty() {
        return Ok(Answer::elsewhere("/", format!("{name}=; Max-Age=0; {attributes}")));
    }
    // The token becomes a cookie, so only plain characters are accepted.
    if !token.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
        return Ok(form(Some(Refusal::Unknown.text())));
    }
    if let Err(refusal) = access::reads(shared, TokenHash::of(token))? {
        return Ok(form(Some(refusal.text())));
    }
    Ok(Answer::elsewhere("/", format!("{name}={token}; Max-Age=2592000; {attributes}")))
}

fn form(refusal: Option<&str>) -> Answer {
    let content = html! {
        @if let Some(refusal) = refusal { p role="alert" { (refusal) } }
        p { "Sign in with the token of an application. Its operator has it, or makes one: " code { "gctrace apps add NAME" } "." }
        form method="post" action="/sign-in" {
            label { "Token " br; input type="password" name="token" autocomplete="current-password" required; }
            button { "Sign in" }
        }
    };
    Answer::page(StatusCode::UNAUTHORIZED, page("Sign in", &[], &content))
}

fn list(head: Head<'_>, apps: &[AppInfo]) -> Answer {
    let now = now();
    let rows: Vec<Vec<Markup>> = apps
        .iter()
        .map(|info| {
            vec![
                html! { a href=(format!("/app/{}", info.app.0)) { (named(&info.title(apps))) } },
                html! { (info.last.map_or_else(|| "never".to_owned(), |last| ago(now - last))) },
                html! { (count(info.sets)) },
                html! { (bytes(info.bytes)) },
            ]
        })
        .collect();
    let columns = [
        Column::Text("Application"),
        Column::Number("Latest set"),
        Column::Number("Sets"),
        Column::Number("Kept"),
    ];
    let content = html! {
        @if apps.is_empty() {
            p { "There are none yet. This makes one and prints its token:" }
            (lines("gctrace apps --store STORE add NAME"))
        } @else {
            (table(&counted(apps.len() as u64, "application", "applications"), &columns, &rows))
        }
    };
    Answer::page(StatusCode::OK, page_with(head, "Applications", &[], &content))
}

/// A name from outside, without characters that would rearrange the text around it.
fn named(name: &str) -> String {
    let name = printable_part(name, MAX_NAME);
    if name.trim().is_empty() { "(no name)".to_owned() } else { name }
}

/// Which figures of an application to show.
#[derive(Clone, Debug, Default)]
struct Wanted {
    days: u32,
    environment: Option<String>,
    host: Option<String>,
    pid: Option<i64>,
    compared: Option<compare::Pair>,
    /// The Ruby that recommendations are for.
    ruby: Option<Series>,
}

impl Wanted {
    fn takes(&self, slot: &Slot) -> bool {
        self.environment.as_ref().is_none_or(|environment| *environment == slot.environment)
            && self.host.as_ref().is_none_or(|host| *host == slot.host)
            && self.pid.is_none_or(|pid| pid == slot.pid)
    }

    /// The query string that selects these figures.
    fn query(&self) -> String {
        let mut query = format!("?days={}", self.days);
        for (key, value) in [("env", &self.environment), ("host", &self.host)] {
            if let Some(value) = value {
                query.extend(["&", key, "=", &encoded(value)]);
            }
        }
        if let Some(pid) = self.pid {
            query.extend(["&pid=", &pid.to_string()]);
        }
        if let Some(ruby) = self.ruby {
            query.extend(["&ruby=", &ruby.to_string()]);
        }
        query
    }
}

/// Figures of several slots.
#[derive(Clone, Debug, Default)]
struct Sum {
    figures: Figures,
    slots: u64,
    first: i64,
    last: i64,
    latest: Latest,
}

impl Sum {
    /// Adds a slot to a sum that will be ordered by time.
    fn add_at(&mut self, slot: &Slot, at: Latest) {
        self.latest = if self.slots == 0 { at } else { self.latest.max(at) };
        self.add(slot);
    }

    /// Orders sums by when they were seen last, latest first.
    fn after(&self, other: &Self) -> std::cmp::Ordering {
        self.latest.after(other.latest).then(other.first.cmp(&self.first))
    }

    fn add(&mut self, slot: &Slot) {
        self.first = if self.slots == 0 { slot.at } else { self.first.min(slot.at) };
        self.last = self.last.max(slot.at);
        self.slots += 1;
        self.figures.merge(&slot.figures);
    }
}

fn application(
    shared: &Shared,
    head: Head<'_>,
    info: &AppInfo,
    title: &str,
    wanted: &Wanted,
) -> Result<Answer, StoreError> {
    let now = now();
    let since = now as i64 - i64::from(wanted.days) * 86_400;
    let all = shared.store.slots(info.app, since)?;
    // At the limit, the oldest slots are deleted in batches.
    let full = all.len() + BATCH as usize >= MAX_SLOTS as usize;
    let since = if full { all.last().map_or(since, |slot| slot.at) } else { since };
    let taken: Vec<&Slot> = all.iter().filter(|slot| wanted.takes(slot)).collect();
    let advice = recommended(shared, info.app, wanted.ruby)?;
    let mut rubies: BTreeSet<Series> = all.iter().map(|slot| slot.series).collect();
    rubies.extend(advice.as_ref().map(|advice| advice.series));
    let seen = Seen::of(&*shared.store, info.app, &all)?;
    let is_part = wanted.environment.is_some() || wanted.host.is_some() || wanted.pid.is_some();
    let content = html! {
        nav aria-label="Time" {
            @for days in [1, 7, 30] {
                @let to = Wanted { days, ..wanted.clone() }.query();
                a href=(to) aria-current=[(days == wanted.days).then_some("true")] {
                    @if days == 1 { "1 day" } @else { (days) " days" }
                }
            }
            @if is_part { a href=(Wanted { days: wanted.days, ..Wanted::default() }.query()) { "The whole application" } }
        }
        @if let Some(host) = &wanted.host {
            p { "Host " strong { (named(host)) } @if let Some(pid) = wanted.pid { ", process " strong { (pid) } } }
        }
        @if let Some(environment) = &wanted.environment { p { "With " strong { (environment_text(environment)) } } }
        @if full { p.soft { "There is about as much as is kept and shown: older figures may be left out." } }
        @if taken.is_empty() {
            p { "No sample set arrived in this time. On the host of the program, with this application's token:" }
            (lines("sudo RUBY_GC_TOKEN=… gctrace --all-ruby --quiet --tunemygc-url URL"))
        } @else {
            (charts(&taken, since, now))
        }
        (recommended::section(advice.as_ref(), &rubies, &|series| {
            Wanted { ruby: Some(series), ..wanted.clone() }.query()
        }))
        @if let Some(advice) = advice.as_ref().filter(|advice| !advice.history.is_empty()) {
            h2 { "What was advised, and its effect" }
            (history::timeline(&advice.history, now))
        }
        (compare::section(&all, &seen, since, now, wanted))
        @if !taken.is_empty() {
            h2 { "Environments" }
            @let concurrent = advice.as_ref().is_some_and(|advice| advice.concurrent.is_some());
            (environments(&all, &seen, wanted, now, concurrent))
            h2 { "Processes" }
            (processes(&taken, &seen, wanted, now))
        }
    };
    Ok(Answer::page(StatusCode::OK, page_with(head, &named(title), &above(), &content)))
}

fn environment_name(environment: &str) -> String {
    if environment.is_empty() {
        "no RUBY_GC_* variables".to_owned()
    } else {
        printable_part(environment, MAX_NAME)
    }
}

/// An environment's name for a narrow column: lines break between its settings, and within their names only after a `_`.
fn environment_text(environment: &str) -> Markup {
    settings(&environment_name(environment))
}

/// The column of a time in a chart that starts at `since` and spans `span` seconds.
fn column(at: i64, since: i64, span: f64) -> usize {
    (((at - since) as f64 / span * COLUMNS as f64).max(0.0) as usize).min(COLUMNS - 1)
}

fn charts(slots: &[&Slot], since: i64, now: f64) -> Markup {
    let span = (now - since as f64).max(1.0);
    let mut columns = vec![Sum::default(); COLUMNS];
    for slot in slots {
        columns[column(slot.at, since, span)].add(slot);
    }
    let axis = chart::Axis { columns: COLUMNS, ends: [ago(span), "now".to_owned()] };
    let of = |value: fn(&Figures) -> Option<f64>| -> Vec<Option<f64>> {
        columns.iter().map(|sum| (sum.slots > 0).then_some(&sum.figures).and_then(value)).collect()
    };
    let positive = |value: u64| (value > 0).then_some(value as f64);
    let share = of(|figures| figures.share().map(|share| share * 100.0));
    let counts: Vec<Vec<u64>> = columns.iter().map(|sum| sum.figures.classes.to_vec()).collect();
    let rss: Vec<_> = columns.iter().map(|sum| positive(sum.figures.rss)).collect();
    let heap: Vec<_> = columns.iter().map(|sum| positive(sum.figures.slots)).collect();
    html! {
        div.charts {
            (chart::line("Share of the time in GC", &axis, &share, |value| format!("{value:.1} %")))
            (chart::heat("Time in GC per cycle", &axis, &CLASS_NAMES, &counts))
            (chart::line("Largest heap of a process, slots", &axis, &heap, short))
            (chart::line("Most resident memory of a process", &axis, &rss, |value| bytes(value as u64)))
        }
        p.soft { "Time in GC is Ruby's own GC.stat(:time), which Ruby counts from 3.1 on, between neighbouring cycles." }
    }
}

/// Formats a count for an axis.
fn short(value: f64) -> String {
    let units = [(1e9, "G"), (1e6, "M"), (1e3, "k")];
    match units.into_iter().find(|(size, _)| value >= *size) {
        Some((size, unit)) => format!("{:.1}{unit}", value / size),
        None => format!("{value:.0}"),
    }
}

/// The name of the class that contains the 99th percentile of the cycles.
fn p99(figures: &Figures) -> String {
    match figures.p99() {
        None => "–".to_owned(),
        Some(class) => match BOUNDS.get(class) {
            Some(bound) => format!("< {bound} ms"),
            None => format!("≥ {} ms", BOUNDS[BOUNDS.len() - 1]),
        },
    }
}

/// The figures of a row. If the time of its latest set is unknown, the start of its latest slot gives an upper bound on the age.
fn figures(sum: &Sum, seen: Option<f64>, now: f64) -> Vec<Markup> {
    let figures = &sum.figures;
    let or_none = |known: bool, text: String| if known { text } else { "–".to_owned() };
    vec![
        html! { (figures.share().map_or_else(|| "–".to_owned(), percent)) },
        html! { (count(figures.cycles)) },
        html! { (count(figures.majors)) },
        html! { (p99(figures)) },
        html! { (or_none(figures.slots > 0, count(figures.slots))) },
        html! { (or_none(figures.rss > 0, bytes(figures.rss))) },
        html! { (seen.map_or_else(|| since(now - sum.last as f64), |seen| ago(now - seen))) },
    ]
}

const FIGURES: [Column; 7] = [
    Column::Number("In GC"),
    Column::Number("Cycles"),
    Column::Number("Major"),
    Column::Number("99 % of cycles"),
    Column::Number("Largest heap"),
    Column::Number("Most memory"),
    Column::Number("Last seen"),
];

/// One row per environment and Ruby series, so that the effect of a change of settings is shown side by side.
fn environments(slots: &[Slot], seen: &Seen<'_>, wanted: &Wanted, now: f64, concurrent: bool) -> Markup {
    let mut sums: BTreeMap<(&str, Series), Sum> = BTreeMap::new();
    for slot in slots {
        sums.entry((&slot.environment, slot.series)).or_default().add_at(slot, seen.at(slot));
    }
    let mut sums: Vec<_> = sums.into_iter().collect();
    // Latest first.
    sums.sort_by(|(_, one), (_, other)| one.after(other));
    let rows: Vec<Vec<Markup>> = sums
        .iter()
        .take(MAX_ENVIRONMENTS)
        .map(|((environment, series), sum)| {
            let to = Wanted {
                days: wanted.days,
                environment: Some((*environment).to_owned()),
                ..Wanted::default()
            };
            let mut row =
                vec![html! { a href=(to.query()) { (environment_text(environment)) } }, html! { (series) }];
            row.extend(figures(sum, sum.latest.seen(), now));
            row
        })
        .collect();
    let columns: Vec<Column> =
        [Column::Text("Environment"), Column::Number("Ruby")].into_iter().chain(FIGURES).collect();
    html! {
        (table("Whole application, latest environment first", &columns, &rows))
        @let left = sums.len().saturating_sub(MAX_ENVIRONMENTS);
        @if left > 0 { p.soft { (counted(left as u64, "earlier one is", "earlier ones are")) " not shown." } }
        // If two are in force at the same time, neither precedes the other.
        @if !concurrent && let [(new, after), (old, before), ..] = sums.as_slice() { (change(new, after, old, before)) }
    }
}

/// The latest environment compared with the one before it.
fn change(new: &(&str, Series), after: &Sum, old: &(&str, Series), before: &Sum) -> Markup {
    let name = |(environment, series): &(&str, Series)| html! { "Ruby " (series) ", " (environment_text(environment)) };
    html! {
        h2 { "The latest environment compared with the one before" }
        p { "Before: " (name(old)) "." br; "After: " (name(new)) "." }
        (compare::side_by_side(["Before", "After"], [before, after]))
    }
}

fn processes(slots: &[&Slot], seen: &Seen<'_>, wanted: &Wanted, now: f64) -> Markup {
    let mut sums: BTreeMap<(&str, i64, Series), Sum> = BTreeMap::new();
    for slot in slots {
        sums.entry((&slot.host, slot.pid, slot.series)).or_default().add_at(slot, seen.at(slot));
    }
    let mut sums: Vec<_> = sums.into_iter().collect();
    sums.sort_by(|(_, one), (_, other)| one.after(other));
    let rows: Vec<Vec<Markup>> = sums
        .iter()
        .take(MAX_PROCESSES)
        .map(|((host, pid, series), sum)| {
            let to = Wanted { host: Some((*host).to_owned()), pid: Some(*pid), ..wanted.clone() };
            let mut row = vec![html! { a href=(to.query()) { (named(host)) " " (pid) } }, html! { (series) }];
            row.extend(figures(sum, None, now));
            row
        })
        .collect();
    let columns: Vec<Column> =
        [Column::Text("Process"), Column::Number("Ruby")].into_iter().chain(FIGURES).collect();
    let caption = if sums.len() > MAX_PROCESSES {
        format!("The latest {MAX_PROCESSES} of {} processes", count(sums.len() as u64))
    } else {
        format!("{}, the latest first", counted(sums.len() as u64, "process", "processes"))
    };
    table(&caption, &columns, &rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The browser's own statement decides; without one the origin does, with and without a proxy in front.
    #[test]
    fn foreign() {
        let public = Some("https://gc.example/x/");
        for (public_url, headers, expected) in [
            (None, &[][..], false),
            (None, &[("sec-fetch-site", "same-origin"), ("origin", "null")], false),
            (None, &[("sec-fetch-site", "none")], false),
            (None, &[("sec-fetch-site", "same-site"), ("origin", "http://h:1")], true),
            (None, &[("sec-fetch-site", "cross-site")], true),
            (None, &[("origin", "http://h:1")], false),
            (None, &[("origin", "http://h:2")], true),
            (None, &[("origin", "null")], true),
            (public, &[("origin", "https://gc.example")], false),
            (public, &[("origin", "http://h:1")], false),
            (public, &[("origin", "https://gc.ex")], true),
            (public, &[("origin", "https://gc.example.evil")], true),
        ] {
            let mut map = header::HeaderMap::new();
            map.insert(header::HOST, header::HeaderValue::from_static("h:1"));
            for (name, value) in headers {
                map.insert(*name, header::HeaderValue::from_static(value));
            }
            assert_eq!(is_foreign(public_url, &map), expected, "{public_url:?} {headers:?}");
        }
    }
}
