//! Maps requests to answers.

use std::sync::{Arc, atomic::Ordering};

use http_body_util::Full;
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Bytes, Incoming},
    header,
};

use super::{
    MAX_BODY, Shared,
    access::{self, Sight},
    advice::Advice,
    answer::Answer,
    body::{Body, BodyError, Reader},
    history, ingest, now,
    pages::{self, Visitor},
};
use crate::{
    store::{App, Group, MAX_FIELD, NewApp, Rights, SetId, StoreError, TokenHash, is_field, new_token},
    tune::{Series, Strategy},
};

/// Maximum size of a form's body, bytes.
const MAX_FORM: usize = 16 << 10;
/// Maximum number of applications; above it, none can register itself.
const MAX_APPS: u64 = 10_000;

/// Answers a request and counts the answer.
pub(super) async fn answer(
    shared: Arc<Shared>,
    request: Request<Incoming>,
    scheme: &'static str,
) -> Response<Full<Bytes>> {
    let path = request.uri().path().to_owned();
    let get = matches!(*request.method(), Method::GET | Method::HEAD);
    let post = *request.method() == Method::POST;
    let (route, answer) = if path == "/ruby" && post {
        ("/ruby", set(&shared, request, scheme).await)
    } else if path == "/accounts" && post {
        ("/accounts", account(&shared, request).await)
    } else if let Some(token) = path.strip_prefix("/apps/").filter(|_| get) {
        let token = TokenHash::of(token);
        let query = request.uri().query().unwrap_or_default().to_owned();
        ("/apps", blocking(&shared, move |shared| app(shared, token, &query)).await)
    } else if let Some(id) = path.strip_prefix("/configs/").filter(|_| get) {
        let id = id.to_owned();
        ("/configs", blocking(&shared, move |shared| config(shared, &id)).await)
    } else if path == "/style.css" && get {
        ("/style.css", Answer::style())
    } else if get && pages::is_page(&path) {
        let scheme = shared.options.pages_scheme(scheme);
        let (visitor, query) = (Visitor::of(&shared, request.headers(), scheme), request.uri().query());
        let query = query.unwrap_or_default().to_owned();
        let page = path.clone();
        // The semaphore is never closed, so a permit always arrives.
        let _place = if page == "/" { None } else { shared.pages.acquire().await.ok() };
        ("pages", blocking(&shared, move |shared| pages::show(shared, &visitor, &page, &query)).await)
    } else if path == "/sign-in" && post {
        ("/sign-in", sign_in(&shared, request, shared.options.pages_scheme(scheme)).await)
    } else if path == "/healthz" && get {
        let check =
            |shared: &Shared| shared.store.latest_group(App(0)).map(|_| Answer::new(StatusCode::OK, "ok\n"));
        ("/healthz", blocking(&shared, check).await)
    } else if path == "/metrics" && get {
        let text = |shared: &Shared| {
            let text = shared.metrics.to_text(shared.store.totals()?);
            Ok(Answer::openmetrics(text))
        };
        ("/metrics", blocking(&shared, text).await)
    } else {
        ("other", elsewhere(&path))
    };
    let held = shared.unread.hold(answer.shown().into_owned());
    let (answer, bytes) = if let Some(bytes) = held {
        (answer, bytes)
    } else {
        let busy = "too many answers wait to be read; try again later";
        (Answer::new(StatusCode::SERVICE_UNAVAILABLE, busy), busy.into())
    };
    shared.metrics.answered(route, answer.code.as_u16());
    let mut response = Response::new(Full::new(bytes));
    *response.status_mut() = answer.code;
    let headers = response.headers_mut();
    for (name, value) in answer.headers {
        // A value that is not valid in a header is omitted.
        if let Ok(value) = header::HeaderValue::from_str(&value) {
            headers.insert(name, value);
        }
    }
    headers.insert(header::CONTENT_TYPE, header::HeaderValue::from_static(answer.kind));
    // A browser must not interpret the answer as a page.
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, header::HeaderValue::from_static("nosniff"));
    // The coding that the sender may use next time (RFC 7694).
    headers.insert(header::ACCEPT_ENCODING, header::HeaderValue::from_static("gzip"));
    response
}

fn elsewhere(path: &str) -> Answer {
    let known = ["/ruby", "/accounts", "/healthz", "/metrics", "/", "/sign-in", "/style.css"].contains(&path)
        || ["/apps/", "/app/", "/configs/"].iter().any(|prefix| path.starts_with(prefix));
    if known {
        Answer::new(StatusCode::METHOD_NOT_ALLOWED, "this resource has other methods")
    } else {
        Answer::new(
            StatusCode::NOT_FOUND,
            "there are /, POST /ruby, POST /accounts, GET /apps/TOKEN, GET /configs/ID, GET /healthz and GET /metrics",
        )
    }
}

/// Runs blocking work on another thread.
async fn blocking(
    shared: &Arc<Shared>,
    work: impl FnOnce(&Shared) -> Result<Answer, StoreError> + Send + 'static,
) -> Answer {
    let of = Arc::clone(shared);
    match tokio::task::spawn_blocking(move || work(&of)).await {
        Ok(Ok(answer)) => answer,
        Ok(Err(error)) => {
            shared.failures.report(&error);
            Answer::failed()
        }
        Err(error) => {
            shared.failures.report_as("a request failed", &error);
            Answer::new(
                StatusCode::INTERNAL_SERVER_ERROR,
                "the collector failed on this request; please report it",
            )
        }
    }
}

/// The answer to a body that did not arrive. A temporary failure is a 500, because agents retry only after that code.
fn no_body(error: BodyError, limit: usize) -> Answer {
    match error {
        BodyError::TooLarge => Answer::bad(format!("payload: is larger than {limit} bytes")),
        BodyError::Broken => Answer::bad("payload: is incomplete"),
        BodyError::Late => {
            Answer::new(StatusCode::INTERNAL_SERVER_ERROR, "payload: did not arrive in time; send it again")
        }
        BodyError::Busy => Answer::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            "too many large payloads at a time; send it again later",
        ),
    }
}

/// `POST /ruby`.
async fn set(shared: &Arc<Shared>, request: Request<Incoming>, scheme: &'static str) -> Answer {
    let head = |name| request.headers().get(name).and_then(|value| value.to_str().ok());
    let gzip = match is_gzip(request.headers()) {
        Ok(gzip) => gzip,
        Err(answer) => return answer,
    };
    let ours = head(header::USER_AGENT).is_some_and(|agent| agent.starts_with("gctrace/"));
    let base = base(shared, head(header::HOST), scheme);
    let body = match set_body(shared, request, gzip).await {
        Ok(body) => body,
        Err(answer) => return answer,
    };
    shared.metrics.received_bytes.fetch_add(body.bytes.len() as u64, Ordering::Relaxed);
    let size = match ingest::announced_size(&body.bytes, gzip) {
        Ok(size) => size,
        Err(answer) => return answer,
    };
    // The semaphores are never closed, so permits always arrive.
    let large = Arc::clone(&shared.large);
    let large = if size > super::LARGE { large.acquire_owned().await.ok() } else { None };
    let worker = Arc::clone(&shared.workers).acquire_owned().await.ok();
    let work = ingest::Work { body, gzip, size, judge_version: !ours, base };
    blocking(shared, move |shared| {
        // Held until the work is done. The work continues if its sender disconnects, in which case this future is no longer awaited.
        let _places = (large, worker);
        ingest::set(shared, &work)
    })
    .await
}

/// Receives the body of a set. More than its first piece is received only if the token is known.
async fn set_body(shared: &Arc<Shared>, request: Request<Incoming>, gzip: bool) -> Result<Body, Answer> {
    let no_body = |error| no_body(error, MAX_BODY);
    let mut reader = Reader::begin(request, MAX_BODY).await.map_err(no_body)?;
    if let Err(beginning) = reader.so_far() {
        let token = ingest::token(beginning, gzip);
        let known = blocking(shared, move |shared| match token {
            Err(answer) => Ok(answer),
            Ok(token) => Ok(match access::writes(shared, token)? {
                Ok(_) => Answer::new(StatusCode::OK, ""),
                Err(refusal) => refusal.answer(),
            }),
        });
        let known = known.await;
        if known.code != StatusCode::OK {
            reader.drain().await;
            return Err(known);
        }
    }
    reader.rest(&shared.memory).await.map_err(no_body)
}

/// Whether a body is compressed. Names of codings are case-insensitive (RFC 9110, 8.4.1).
fn is_gzip(headers: &header::HeaderMap) -> Result<bool, Answer> {
    let codings: Vec<_> = headers
        .get_all(header::CONTENT_ENCODING)
        .iter()
        .map(|value| String::from_utf8_lossy(value.as_bytes()))
        .collect();
    let codings = codings.join(", ");
    match codings.trim().to_ascii_lowercase().as_str() {
        "" | "identity" => Ok(false),
        "gzip" | "x-gzip" => Ok(true),
        _ => {
            Err(Answer::bad(format!("Content-Encoding: `{codings}` is not understood; send gzip or nothing")))
        }
    }
}

/// The prefix of addresses in answers: scheme and host.
fn base(shared: &Shared, host: Option<&str>, scheme: &str) -> String {
    if let Some(url) = &shared.options.public_url {
        return url.trim_end_matches('/').to_owned();
    }
    let valid = |byte: u8| byte.is_ascii_alphanumeric() || b".-:[]_".contains(&byte);
    let host = host.filter(|host| !host.is_empty() && host.len() <= MAX_FIELD && host.bytes().all(valid));
    format!("{scheme}://{}", host.map_or_else(|| shared.options.listen.to_string(), ToOwned::to_owned))
}

/// Receives the body of a form. It takes no memory from the shared limit.
async fn form(request: Request<Incoming>) -> Result<Vec<u8>, BodyError> {
    let mut reader = Reader::begin(request, MAX_FORM + 1).await?;
    match reader.so_far() {
        Ok(body) if body.len() <= MAX_FORM => Ok(body.to_vec()),
        _ => {
            reader.drain().await;
            Err(BodyError::TooLarge)
        }
    }
}

/// `POST /sign-in`: the token of a form becomes a cookie; without a token, the cookie is deleted.
async fn sign_in(shared: &Arc<Shared>, request: Request<Incoming>, scheme: &'static str) -> Answer {
    let foreign = pages::is_foreign(shared.options.public_url.as_deref(), request.headers());
    let body = match form(request).await {
        Ok(body) => body,
        Err(error) => return no_body(error, MAX_FORM),
    };
    if foreign {
        return Answer::new(StatusCode::FORBIDDEN, "a page of another site cannot sign in or out");
    }
    let token =
        form_urlencoded::parse(&body).find(|(key, _)| key == "token").map(|(_, value)| value.into_owned());
    blocking(shared, move |shared| {
        pages::sign_in(shared, token.as_deref().unwrap_or_default().trim(), scheme)
    })
    .await
}

/// `POST /accounts`.
async fn account(shared: &Arc<Shared>, request: Request<Incoming>) -> Answer {
    let refused = |text: &str| Answer::new(StatusCode::UNPROCESSABLE_ENTITY, text);
    let headers = request.headers();
    let open = shared.options.registration.unwrap_or_else(|| pages::is_local(shared, headers));
    let foreign = pages::is_foreign(shared.options.public_url.as_deref(), headers);
    let body = match form(request).await {
        Ok(body) => body,
        Err(error) => return no_body(error, MAX_FORM),
    };
    if !open {
        return refused(
            "this collector takes no registrations; its operator adds applications (gctrace apps add)",
        );
    }
    if foreign {
        return refused("a page of another site cannot register applications");
    }
    let (mut email, mut name) = (None, None);
    for (key, value) in form_urlencoded::parse(&body) {
        match &*key {
            "email" => email = Some(value.into_owned()),
            "app" => name = Some(value.into_owned()),
            _ => {}
        }
    }
    let good = |text: &String| is_field(text);
    let Some(email) = email.filter(good).filter(|email| email.contains('@')) else {
        return refused("email: is not an email address");
    };
    let Some(name) = name.filter(good) else { return refused("app: is not the name of an application") };
    blocking(shared, move |shared| register(shared, &email, &name)).await
}

fn register(shared: &Shared, email: &str, name: &str) -> Result<Answer, StoreError> {
    if shared.store.totals()?.apps >= MAX_APPS {
        return Ok(Answer::new(StatusCode::UNPROCESSABLE_ENTITY, "this collector has too many applications"));
    }
    let Some(token) = new_token() else {
        shared.failures.report(&"the system returned no random numbers");
        return Ok(Answer::new(StatusCode::INTERNAL_SERVER_ERROR, "no token could be made; try again"));
    };
    let app = NewApp { name, email, parent: None, created: now() };
    shared.store.register(&app, TokenHash::of(&token), Rights::Both)?;
    Ok(Answer::new(StatusCode::OK, token))
}

/// The parameters of `GET /apps/TOKEN`.
#[derive(Debug, Default, PartialEq)]
struct Wanted {
    strategy: Option<Strategy>,
    ruby: Option<Series>,
    app: Option<App>,
    json: bool,
}

impl Wanted {
    fn parse(query: &str) -> Result<Self, String> {
        let mut wanted = Self::default();
        for (key, value) in form_urlencoded::parse(query.as_bytes()) {
            match (&*key, &*value) {
                ("strategy", "speed") => wanted.strategy = Some(Strategy::Speed),
                ("strategy", "memory") => wanted.strategy = Some(Strategy::Memory),
                ("strategy", _) => return Err("strategy: is speed or memory".to_owned()),
                ("ruby", version) => {
                    let series = Series::parse(version);
                    wanted.ruby = Some(series.ok_or("ruby: is a version such as 3.4, from 2.2 to 4.1")?);
                }
                ("app", number) => {
                    let number = number.parse().map_err(|_| "app: is the number of an application")?;
                    wanted.app = Some(App(number));
                }
                ("format", "json") => wanted.json = true,
                ("format", "text") => wanted.json = false,
                ("format", _) => return Err("format: is text or json".to_owned()),
                // Unknown parameters are ignored.
                _ => {}
            }
        }
        Ok(wanted)
    }
}

/// `GET /apps/TOKEN`: all recommended settings, for a shell or as JSON.
fn app(shared: &Shared, token: TokenHash, query: &str) -> Result<Answer, StoreError> {
    let wanted = match Wanted::parse(query) {
        Ok(wanted) => wanted,
        Err(problem) => return Ok(Answer::bad(problem)),
    };
    let sight = match access::reads(shared, token)? {
        Ok(sight) => sight,
        Err(refusal) => return Ok(refusal.answer()),
    };
    let app = match (wanted.app, sight) {
        (None, Sight::Of(app)) => app,
        (None, Sight::All) => return Ok(Answer::bad("app: an operator's token needs the number of one")),
        (Some(app), _) if shared.store.apps()?.iter().any(|info| info.app == app && sight.sees(info)) => app,
        (Some(_), _) => {
            return Ok(Answer::new(StatusCode::NOT_FOUND, "app: this token has no such application"));
        }
    };
    let group = match wanted.ruby {
        Some(series) => Some(Group { app, series }),
        None => shared.store.latest_group(app)?,
    };
    let advice = group.map(|group| Advice::of(shared, group, None)).transpose()?.flatten();
    let Some(advice) = advice else { return Ok(Answer::new(StatusCode::NO_CONTENT, "")) };
    let strategy = wanted.strategy.unwrap_or(Strategy::Speed);
    history::give(shared, &advice, std::slice::from_ref(advice.report.plan(strategy)));
    let own = |name: &str, value: f64| advice.is_own(name, value);
    if wanted.json {
        let mut state = advice.report.to_state(strategy, &own);
        state["history"] = history::to_json(&history::of(shared, &advice)?);
        return Ok(Answer::json(StatusCode::OK, state.to_string()));
    }
    let exports = advice.report.to_exports(strategy, &own);
    let code = if exports.is_empty() { StatusCode::NO_CONTENT } else { StatusCode::OK };
    Ok(Answer::new(code, exports))
}

/// `GET /configs/ID` and `GET /configs/ID.json`: the recommended settings, and why.
fn config(shared: &Shared, id: &str) -> Result<Answer, StoreError> {
    let (id, json) = id.strip_suffix(".json").map_or((id, false), |id| (id, true));
    let group = SetId::parse(id).map(|id| shared.store.group_of(&id)).transpose()?.flatten();
    let advice =
        group.map(|(group, environment)| Advice::of(shared, group, Some(environment))).transpose()?;
    let Some(advice) = advice.flatten() else {
        return Ok(Answer::new(StatusCode::NOT_FOUND, "no such configuration"));
    };
    history::give(shared, &advice, &advice.report.plans);
    Ok(if json {
        Answer::json(StatusCode::OK, advice.report.to_config().to_string())
    } else {
        Answer::new(StatusCode::OK, advice.report.to_string())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known parameters are parsed or refused; unknown ones are ignored.
    #[test]
    fn queries() {
        let wanted = Wanted::parse("strategy=memory&ruby=3.4&format=json&app=7&utm=x").unwrap();
        let expected = Wanted {
            strategy: Some(Strategy::Memory),
            ruby: Some(Series(3, 4)),
            app: Some(App(7)),
            json: true,
        };
        assert_eq!(wanted, expected);
        assert_eq!(Wanted::parse("").unwrap(), Wanted::default());
        for bad in ["strategy=fast", "ruby=9.9", "ruby=", "format=xml", "strategy", "app=x"] {
            assert!(Wanted::parse(bad).is_err(), "{bad}");
        }
    }
}
