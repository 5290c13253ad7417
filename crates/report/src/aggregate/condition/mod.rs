//! Conditions on observations: `gc.pause > 10ms and thread ~ worker`.
//!
//! A field exists only for some kinds of records. The part of a condition whose fields a kind has applies to records of that kind; records
//! with none of its fields are not affected. An unknown value, such as the duration of a request whose end was not seen, makes a comparison
//! unknown; a record is kept if the condition is true.

mod fields;
mod parse;
#[cfg(test)]
mod tests;

use std::{fmt, str::FromStr};

use super::recording::Pattern;
use crate::model::{Process, seen::Seen};
use fields::Value;
pub use fields::{Field, Kind};

/// How a field is compared, and with what.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Test {
    /// Compares a number or time.
    Number(Order, i128),
    /// The text equals this one.
    Text(String),
    /// The text contains this pattern.
    Matches(Pattern),
}

/// Comparisons of numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    Less,
    AtMost,
    Equal,
    AtLeast,
    Greater,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Node {
    Test(Field, Test),
    Not(Box<Node>),
    And(Vec<Node>),
    Or(Vec<Node>),
}

/// A condition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Condition {
    text: String,
    node: Node,
}

/// The result of a condition for a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The record has none of the condition's fields.
    Untouched,
    /// The condition is true.
    True,
    /// The condition is false.
    False,
    /// A value that the condition needs is unknown.
    Unknown,
}

impl Condition {
    /// Evaluates the condition for a record.
    pub fn judge(&self, process: &Process, seen: &Seen<'_>) -> Verdict {
        if Kind::of(seen) != Kind::Process {
            return judge(&self.node, process, seen, Verdict::Untouched);
        }
        // A process is kept as long as any record of it might match.
        match judge(&self.node, process, seen, Verdict::Unknown) {
            Verdict::Unknown => Verdict::Untouched,
            verdict => verdict,
        }
    }

    /// Whether it tests a field that records of this kind have.
    pub fn applies_to(&self, kind: Kind) -> bool {
        asks(&self.node, &|field| field.kinds().contains(&kind))
    }

    /// Whether it tests threads.
    pub fn asks_for_threads(&self) -> bool {
        asks(&self.node, &|field| field == Field::Thread)
    }
}

/// Whether `of` holds for any of its fields.
fn asks(node: &Node, of: &impl Fn(Field) -> bool) -> bool {
    match node {
        Node::Test(field, _) => of(*field),
        Node::Not(node) => asks(node, of),
        Node::And(nodes) | Node::Or(nodes) => nodes.iter().any(|node| asks(node, of)),
    }
}

/// `absent` is the verdict of a comparison whose field records of this kind do not have.
fn judge(node: &Node, process: &Process, seen: &Seen<'_>, absent: Verdict) -> Verdict {
    let of = |nodes: &[Node], decides: Verdict, else_: Verdict| {
        let mut verdict = Verdict::Untouched;
        for node in nodes {
            match judge(node, process, seen, absent) {
                Verdict::Untouched => {}
                found if found == decides => return decides,
                Verdict::Unknown => verdict = Verdict::Unknown,
                _ if verdict == Verdict::Unknown => {}
                _ => verdict = else_,
            }
        }
        verdict
    };
    match node {
        Node::And(nodes) => of(nodes, Verdict::False, Verdict::True),
        Node::Or(nodes) => of(nodes, Verdict::True, Verdict::False),
        Node::Not(node) => match judge(node, process, seen, absent) {
            Verdict::True => Verdict::False,
            Verdict::False => Verdict::True,
            other => other,
        },
        Node::Test(field, test) => match field.of(process, seen) {
            Value::Absent => absent,
            Value::Unknown => Verdict::Unknown,
            Value::Thread(_, None) if !matches!(test, Test::Number(..)) => Verdict::Unknown,
            value if test.holds(&value) => Verdict::True,
            _ => Verdict::False,
        },
    }
}

impl Order {
    fn holds(self, number: i128, than: i128) -> bool {
        match self {
            Self::Less => number < than,
            Self::AtMost => number <= than,
            Self::Equal => number == than,
            Self::AtLeast => number >= than,
            Self::Greater => number > than,
        }
    }
}

impl Test {
    fn holds(&self, value: &Value<'_>) -> bool {
        match (self, value) {
            (Self::Number(order, than), Value::Number(number) | Value::Thread(number, _)) => {
                order.holds(i128::from(*number), *than)
            }
            (Self::Number(order, than), Value::Signed(number)) => order.holds(i128::from(*number), *than),
            (Self::Text(text), Value::Text(found)) => text == found,
            (Self::Matches(pattern), Value::Text(found)) => pattern.is_in(found),
            (Self::Text(text), Value::Thread(_, name)) => Some(&**text) == *name,
            (Self::Matches(pattern), Value::Thread(_, name)) => name.is_some_and(|name| pattern.is_in(name)),
            _ => false,
        }
    }
}

impl FromStr for Condition {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Ok(Self { text: text.to_owned(), node: parse::node(text)? })
    }
}

/// The condition as it was written.
impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}
