//! The history of an application's settings as a table.

use gctrace_pages::{Column, settings, stacked_table, words::ago};
use maud::{Markup, html};

use super::super::history::{Event, What};
use crate::tune::{Comparison, InForce, Outcome, Strategy};

/// Maximum number of rows shown.
const MOST: usize = 40;

/// The table of events, latest first.
pub(super) fn timeline(events: &[Event], now: f64) -> Markup {
    let rows: Vec<Vec<Markup>> = events.iter().rev().take(MOST).map(|event| row(event, now)).collect();
    let columns = [
        Column::Text("Since"),
        Column::Text("Until"),
        Column::Text("What"),
        Column::Text("Settings"),
        Column::Text("Compared with those before"),
    ];
    let caption = if events.len() > MOST {
        format!("The latest {MOST} of {} entries", events.len())
    } else {
        "The latest first".to_owned()
    };
    stacked_table(&caption, &columns, &rows)
}

fn row(event: &Event, now: f64) -> Vec<Markup> {
    let (what, settings, brought) = match &event.what {
        What::Advised { strategy, in_force, settings, withdrawal } => {
            let strategy = match strategy {
                Strategy::Speed => "speed",
                Strategy::Memory => "memory",
            };
            let what = if settings == in_force {
                format!("advised for {strategy}: no change")
            } else if *withdrawal {
                format!("advised for {strategy}: go back")
            } else {
                format!("advised for {strategy}")
            };
            (what, settings, html! { "instead of " (shown(in_force)) })
        }
        What::InForce { settings, advised, brought } => {
            let what = match advised {
                Some(true) => "in force, as advised",
                Some(false) => "in force, not advised",
                None => "in force",
            };
            (what.to_owned(), settings, brought.as_deref().map_or_else(|| html! {}, figures))
        }
    };
    vec![
        html! { (ago(now - event.at)) },
        html! { (ago(now - event.until)) },
        html! { (what) },
        shown(settings),
        brought,
    ]
}

fn shown(in_force: &InForce) -> Markup {
    settings(&in_force.to_string())
}

fn figures(brought: &Comparison) -> Markup {
    html! {
        @for (what, outcome) in [("GC time", brought.speed), ("Memory", brought.memory)] {
            @match outcome {
                Outcome::Better => p { (what) ": clearly less" },
                Outcome::Worse => p { (what) ": clearly more" },
                Outcome::Same => p { (what) ": no clear difference" },
                Outcome::Unknown => p { (what) ": not known, too little data" },
            }
        }
        @for figure in &brought.figures { p.soft { (figure) } }
    }
}
