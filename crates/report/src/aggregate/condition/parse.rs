//! Parses conditions:
//!
//! ```text
//! or   = and { "or" and }
//! and  = not { "and" not }
//! not  = "not" not | "(" or ")" | FIELD OPERATOR VALUE
//! ```

use super::{
    Node, Order, Test,
    fields::{Field, Type},
};
use crate::{aggregate::recording::Pattern, words::TIME_UNITS};

/// Maximum nesting depth of parentheses and `not`.
const DEPTH: usize = 64;
/// Maximum number of digits read after the decimal point.
const DIGITS: usize = 9;
const OPERATORS: [&str; 9] = ["<=", ">=", "!=", "!~", "==", "<", ">", "=", "~"];

#[derive(Clone, Debug, PartialEq, Eq)]
enum Token<'a> {
    Open,
    Close,
    Operator(&'a str),
    /// A word that may be a field, `and`, `or`, `not`, or a value.
    Word(&'a str),
    /// A text in quotation marks.
    Quoted(&'a str),
}

impl Token<'_> {
    fn shown(&self) -> String {
        match self {
            Self::Open => "`(`".to_owned(),
            Self::Close => "`)`".to_owned(),
            Self::Operator(text) | Self::Word(text) => format!("`{text}`"),
            Self::Quoted(text) => format!("'{text}'"),
        }
    }
}

/// Parses a condition.
pub(super) fn node(text: &str) -> Result<Node, String> {
    let mut parser = Parser { tokens: tokens(text)?.into_iter().peekable(), depth: 0 };
    let node = parser.or()?;
    match parser.tokens.next() {
        None => Ok(node),
        Some(more) => Err(format!("`and`, `or` or the end was expected, not {}", more.shown())),
    }
}

fn tokens(text: &str) -> Result<Vec<Token<'_>>, String> {
    let mut found: Vec<Token<'_>> = Vec::new();
    let mut rest = text.trim_start();
    while let Some(first) = rest.chars().next() {
        let after_operator = matches!(found.last(), Some(Token::Operator(_)));
        let operator = OPERATORS.iter().find(|operator| rest.starts_with(**operator));
        let (token, length) = match first {
            '(' => (Token::Open, 1),
            ')' => (Token::Close, 1),
            '\'' | '"' => {
                let length = rest[1..].find(first).ok_or_else(|| format!("{rest}: no closing {first}"))?;
                (Token::Quoted(&rest[1..=length]), length + 2)
            }
            // An expression between slashes may contain anything.
            '/' if after_operator => {
                let end = rest[1..].find('/').ok_or_else(|| format!("{rest}: no closing /"))?;
                (Token::Quoted(&rest[..end + 2]), end + 2)
            }
            _ if let Some(operator) = operator => (Token::Operator(operator), operator.len()),
            _ => {
                let ends = |c: char| c.is_whitespace() || "()<>=!~'\"".contains(c);
                let length = rest.find(ends).unwrap_or(rest.len());
                if length == 0 {
                    return Err(format!("unexpected `{first}`"));
                }
                (Token::Word(&rest[..length]), length)
            }
        };
        found.push(token);
        rest = rest[length..].trim_start();
    }
    Ok(found)
}

struct Parser<'a> {
    tokens: std::iter::Peekable<std::vec::IntoIter<Token<'a>>>,
    depth: usize,
}

impl<'a> Parser<'a> {
    fn takes(&mut self, word: &str) -> bool {
        let is = |token: &Token<'_>| matches!(token, Token::Word(found) if found.eq_ignore_ascii_case(word));
        self.tokens.next_if(is).is_some()
    }

    fn or(&mut self) -> Result<Node, String> {
        let mut nodes = vec![self.and()?];
        while self.takes("or") {
            nodes.push(self.and()?);
        }
        Ok(if nodes.len() == 1 { nodes.remove(0) } else { Node::Or(nodes) })
    }

    fn and(&mut self) -> Result<Node, String> {
        let mut nodes = vec![self.not()?];
        while self.takes("and") {
            nodes.push(self.not()?);
        }
        Ok(if nodes.len() == 1 { nodes.remove(0) } else { Node::And(nodes) })
    }

    fn not(&mut self) -> Result<Node, String> {
        self.depth += 1;
        if self.depth > DEPTH {
            return Err(format!("it is nested more than {DEPTH} deep"));
        }
        let node = if self.takes("not") {
            Node::Not(Box::new(self.not()?))
        } else if self.tokens.next_if_eq(&Token::Open).is_some() {
            let node = self.or()?;
            self.tokens.next_if_eq(&Token::Close).ok_or("a `)` is missing")?;
            node
        } else {
            self.test()?
        };
        self.depth -= 1;
        Ok(node)
    }

    fn next(&mut self, expected: &str) -> Result<Token<'a>, String> {
        self.tokens.next().ok_or_else(|| format!("unexpected end: {expected} was expected"))
    }

    fn test(&mut self) -> Result<Node, String> {
        let name = self.next("a field")?;
        let known =
            Field::ALL.into_iter().find(|field| matches!(name, Token::Word(word) if word == field.name()));
        let field = known.ok_or_else(|| {
            let names: Vec<&str> = Field::ALL.iter().map(|field| field.name()).collect();
            format!("{} is not a field; fields are {}", name.shown(), names.join(", "))
        })?;
        let Token::Operator(operator) = self.next("an operator")? else {
            return Err(format!("after {} an operator is expected: > >= < <= = != ~ !~", field.name()));
        };
        let value = self.next("a value")?;
        let (Token::Word(value) | Token::Quoted(value)) = value else {
            return Err(format!("a value was expected, not {}", value.shown()));
        };
        test(field, operator, value)
    }
}

fn test(field: Field, operator: &str, value: &str) -> Result<Node, String> {
    let name = field.name();
    let pattern = || value.parse::<Pattern>().map(Test::Matches).map_err(|error| format!("{name}: {error}"));
    let order = match operator {
        "<" => Order::Less,
        "<=" => Order::AtMost,
        ">=" => Order::AtLeast,
        ">" => Order::Greater,
        _ => Order::Equal,
    };
    let negated = operator.starts_with('!');
    let matches = operator.ends_with('~');
    let ordered = ["<", "<=", ">=", ">"].contains(&operator);
    let test = match field.of_type() {
        Type::Number | Type::Signed | Type::Time if matches => {
            return Err(format!("{name} is a number: compare it with > >= < <= = !="));
        }
        Type::Text | Type::Thread if ordered => {
            return Err(format!("{name} is a text: compare it with = != ~ !~"));
        }
        Type::Time => Test::Number(
            order,
            time(value).map(i128::from).ok_or_else(|| {
                format!(
                    "{name}: `{value}` is not a time: give a number and ns, us, ms, s, m, h or d without a space, such as 10ms"
                )
            })?,
        ),
        Type::Number | Type::Signed => {
            let negative = field.of_type() == Type::Signed;
            let number = value.parse::<i64>().ok().filter(|number| negative || *number >= 0).map(i128::from);
            let number = number.or_else(|| value.parse::<u64>().ok().map(i128::from));
            let number = number.ok_or_else(|| format!("{name}: `{value}` is not a whole number"))?;
            Test::Number(order, number)
        }
        Type::Text | Type::Thread if matches => pattern()?,
        Type::Text if field == Field::GcKind && !["minor", "major"].contains(&value) => {
            return Err(format!("{name} is `minor` or `major`, not `{value}`"));
        }
        Type::Text => Test::Text(value.to_owned()),
        Type::Thread => match value.parse::<u64>() {
            Ok(tid) => Test::Number(order, tid.into()),
            Err(_) => Test::Text(value.to_owned()),
        },
    };
    let node = Node::Test(field, test);
    Ok(if negated { Node::Not(Box::new(node)) } else { node })
}

/// Nanoseconds of `1.5ms`.
fn time(text: &str) -> Option<u64> {
    let at = text.find(|c: char| !c.is_ascii_digit() && c != '.')?;
    let (number, unit) = text.split_at(at);
    let (_, ns) = TIME_UNITS.into_iter().find(|(name, _)| *name == unit)?;
    let (whole, part) = number.split_once('.').unwrap_or((number, "0"));
    if part.is_empty() || part.len() > DIGITS {
        return None;
    }
    let scale = 10_u64.pow(part.len() as u32);
    let part = u128::from(part.parse::<u64>().ok()?) * u128::from(ns) / u128::from(scale);
    whole.parse::<u64>().ok()?.checked_mul(ns)?.checked_add(u64::try_from(part).ok()?)
}
