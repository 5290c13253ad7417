//! Finds the application's code that handles a request, as far as a stack shows it.
//!
//! A web framework calls all handlers from one place in its own code. The frame above that place is the handler: an action of a Rails
//! controller, a route of Sinatra or Grape. A stack without such a place, as in filters and middleware, has no known handler.

use std::sync::Arc;

use crate::model::stack::{Frame, FrameKind};

/// Places where frameworks call handlers: frames, innermost first.
const CALLERS: [&[&str]; 4] = [
    // actionpack 5 to 8: basic_implicit_render.rb, `super` is `send(action)`. `ActionController::Base` and `API`.
    &["ActionController::BasicImplicitRender#send_action"],
    // abstract_controller/base.rb, `send_action(action)`: `ActionController::Metal` without implicit rendering.
    &["AbstractController::Base#process_action"],
    // sinatra/base.rb (2 to 4). Filters are called by `compile!`, too, but not from `route!`.
    &["block in Sinatra::Base.compile!", "block (3 levels) in Sinatra::Base#route!"],
    // grape/endpoint.rb (1.6): the block of a route is turned into a method.
    &["block (2 levels) in Grape::Endpoint.generate_api_method"],
];
/// Prefixes of methods that the frameworks also call there, but that are their own.
const OWN: [&str; 2] = ["ActionController::", "AbstractController::"];

/// The handler in a stack (leaf first), with the line at which it begins. A handler can call another application; the outer handler is
/// returned. `None` if there is none, or if frames outside it are missing.
pub fn handler<'a>(stack: impl Iterator<Item = &'a Arc<Frame>>) -> Option<Arc<Frame>> {
    let called = |frame: &&Arc<Frame>| matches!(frame.kind, FrameKind::Ruby | FrameKind::Missing);
    let frames: Vec<&Arc<Frame>> = stack.filter(called).collect();
    let at = (1..frames.len()).rev().find(|&at| is_caller(&frames[at..]) && is_handler(frames[at - 1]))?;
    let whole = frames[at - 1..].iter().all(|frame| frame.kind == FrameKind::Ruby);
    let Frame { first_line, .. } = **frames[at - 1];
    whole.then(|| Arc::new(Frame { line: first_line, ..Frame::clone(frames[at - 1]) }))
}

fn is_caller(frames: &[&Arc<Frame>]) -> bool {
    CALLERS.iter().any(|names| {
        frames.len() >= names.len() && names.iter().zip(frames).all(|(name, frame)| *frame.name == **name)
    })
}

fn is_handler(frame: &Frame) -> bool {
    frame.kind == FrameKind::Ruby && !OWN.iter().any(|own| frame.name.starts_with(own))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: FrameKind, name: &str, line: u32) -> Arc<Frame> {
        let file = Some(Arc::from("/srv/app.rb"));
        Arc::new(Frame { kind, name: name.into(), file, line, first_line: 7, address: 0 })
    }

    /// The handler in a stack of Ruby methods, leaf first; names in brackets are C functions, `?` is a missing frame.
    fn of(names: &[&str]) -> Option<String> {
        let frames: Vec<Arc<Frame>> = names
            .iter()
            .map(|name| match name.strip_prefix('[').and_then(|name| name.strip_suffix(']')) {
                Some(name) => frame(FrameKind::CFunction, name, 0),
                None if *name == "?" => frame(FrameKind::Missing, "(truncated)", 0),
                None => frame(FrameKind::Ruby, name, 12),
            })
            .collect();
        let handler = handler(frames.iter())?;
        assert_eq!((handler.line, handler.first_line), (7, 7));
        Some(handler.name.to_string())
    }

    const SEND: &str = "ActionController::BasicImplicitRender#send_action";
    const PROCESS: &str = "AbstractController::Base#process_action";

    /// An action is the frame called by `send_action`, wherever in the action the stack was captured.
    #[test]
    fn rails() {
        let orders = Some("OrdersController#show".to_owned());
        assert_eq!(of(&["OrdersController#show", SEND, PROCESS, "Puma::Client#x"]), orders);
        assert_eq!(
            of(&[
                "[Array#each]",
                "Order#total",
                "block in OrdersController#show",
                "[Array#map]",
                "OrdersController#show",
                SEND,
                PROCESS
            ]),
            orders
        );
        assert_eq!(
            of(&["HiController#hi", PROCESS, "AbstractController::Base#process"]).as_deref(),
            Some("HiController#hi")
        );
    }

    /// Filters, implicit rendering and middleware are not handlers, and a caller that is the leaf has called no handler.
    #[test]
    fn nothing_is_guessed() {
        assert_eq!(
            of(&[
                "block in <class:ApplicationController>",
                "ActionController::Callbacks#process_action",
                PROCESS
            ]),
            None
        );
        assert_eq!(of(&["ActionController::ImplicitRender#default_render", SEND, PROCESS]), None);
        assert_eq!(of(&[SEND, PROCESS]), None);
        assert_eq!(of(&["Rack::Logger#call", "Puma::Request#handle"]), None);
        assert_eq!(of(&[]), None);
        assert_eq!(
            of(&[
                "block in <class:Shop>",
                "[Method#call]",
                "block in Sinatra::Base.compile!",
                "Sinatra::Base#process_route"
            ]),
            None
        );
    }

    /// The block of a route, called as a method.
    #[test]
    fn routes() {
        let sinatra = [
            "block in <class:Shop>",
            "[Method#call]",
            "block in Sinatra::Base.compile!",
            "block (3 levels) in Sinatra::Base#route!",
        ];
        assert_eq!(of(&sinatra).as_deref(), Some("block in <class:Shop>"));
        let grape = [
            "Order#total",
            "block in <class:API>",
            "[Method#call]",
            "block (2 levels) in Grape::Endpoint.generate_api_method",
        ];
        assert_eq!(of(&grape).as_deref(), Some("block in <class:API>"));
    }

    /// With nested applications the handler is the outer one, and unknown if frames outside it are missing.
    #[test]
    fn nested() {
        let inner = ["InnerController#call", SEND, PROCESS, "OuterController#run"];
        assert_eq!(of(&[&inner[..], &[SEND, PROCESS]].concat()).as_deref(), Some("OuterController#run"));
        assert_eq!(of(&[&inner[..], &["?"]].concat()), None);
        assert_eq!(
            of(&["?", "InnerController#call", SEND, PROCESS]).as_deref(),
            Some("InnerController#call")
        );
    }
}
