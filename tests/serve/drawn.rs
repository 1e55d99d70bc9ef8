//! Draws requests whose fields are valid or invalid at random.

use serde_json::{Value, json};

use crate::rng::Rng;

/// A field with values that are right, and values that get status 400.
pub struct Field {
    pub name: &'static str,
    pub right: Vec<Value>,
    pub wrong: Vec<Value>,
}

fn field<const R: usize, const W: usize>(
    name: &'static str,
    right: [Value; R],
    wrong: [Value; W],
) -> Field {
    let (right, wrong) = (right.into(), wrong.into());
    Field { name, right, wrong }
}

/// An endpoint with its fields. The first is what it continues, the second is the limit of new tokens.
pub struct Endpoint {
    pub path: &'static str,
    pub fields: Vec<Field>,
}

/// A request.
pub struct Drawn {
    pub path: &'static str,
    pub body: Value,
    /// Fields that are wrong.
    pub wrong: Vec<&'static str>,
}

/// Whether an error names a field.
pub fn names(message: &str, field: &str) -> bool {
    // The two names of the limit are one field.
    message.contains(field) || message.contains(&field.replace("completion_", ""))
}

/// A number too large for any field that takes one.
fn huge() -> Value {
    json!(1e300)
}

fn sampling() -> Vec<Field> {
    vec![
        field(
            "temperature",
            [json!(0), json!(0.7), json!(1.5), json!(null)],
            [json!(-1), json!("x"), json!([]), json!(1e9), huge()],
        ),
        field(
            "top_p",
            [json!(0.5), json!(1), json!(null)],
            [json!(0), json!(2), json!("a"), json!({}), huge()],
        ),
        field(
            "top_k",
            [json!(-1), json!(0), json!(5), json!(1_000_000)],
            [json!(-5), json!(1.5), json!("a"), huge()],
        ),
        field(
            "stream",
            [json!(true), json!(true), json!(false), json!(null)],
            [json!(1), json!("true"), json!([true])],
        ),
    ]
}

fn common() -> Vec<Field> {
    let long = "x".repeat(2000);
    let schema =
        json!({"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "boolean"}}});
    let no_schema = json!({"type": "json_schema", "json_schema": {"name": "a"}});
    let bad_schema = json!({"type": "json_schema", "json_schema": {"schema": {"type": "bool"}}});
    let mut fields = sampling();
    fields.extend([
        field(
            "min_p",
            [json!(0), json!(0.1), json!(null)],
            [json!(-0.1), json!(2), json!(true)],
        ),
        field(
            "seed",
            [json!(0), json!(-3), json!(i64::MAX), json!(null)],
            [json!("a"), json!(1.5), json!([]), huge()],
        ),
        field(
            "stop",
            [json!("the"), json!(["a", " ,"]), json!([]), json!(null)],
            [
                json!(5),
                json!(""),
                json!([""]),
                json!([1]),
                json!({}),
                json!(vec!["a"; 17]),
                json!(long),
            ],
        ),
        field(
            "n",
            [json!(1), json!(2), json!(3), json!(null)],
            [json!(0), json!(-1), json!(129), json!("a"), json!(1.5)],
        ),
        field(
            "logit_bias",
            [
                json!({}),
                json!({"5": -100}),
                json!({"7": 3.5, "9": 100}),
                json!(null),
            ],
            [
                json!({"x": 1}),
                json!({"99999999": 1}),
                json!({"-1": 1}),
                json!({"5": 1000}),
                json!({"5": "a"}),
                json!([1]),
            ],
        ),
        field(
            "presence_penalty",
            [json!(0), json!(-2), json!(1.5)],
            [json!(3), json!("a"), json!([])],
        ),
        field(
            "frequency_penalty",
            [json!(0), json!(2), json!(-0.5)],
            [json!(-3), json!(true)],
        ),
        field(
            "repetition_penalty",
            [json!(1), json!(1.3), json!(null)],
            [json!(0), json!(-1), json!("a")],
        ),
        field(
            "stream_options",
            [json!({"include_usage": true}), json!({}), json!(null)],
            [json!({"include_usage": 3}), json!(5), json!("a")],
        ),
        field(
            "return_token_ids",
            [json!(true), json!(false), json!(null)],
            [json!(1), json!("a")],
        ),
        field(
            "response_format",
            [
                json!({"type": "text"}),
                json!({"type": "json_object"}),
                schema,
                json!(null),
            ],
            [
                json!({"type": "yaml"}),
                json!(5),
                json!({}),
                no_schema,
                bad_schema,
            ],
        ),
        // Unknown fields are ignored, whatever they are.
        field("user", [json!("me"), json!({"a": [1, {}]}), json!(5)], []),
    ]);
    fields
}

/// The limit of new tokens, which keeps requests short.
fn limit(name: &'static str) -> Field {
    field(
        name,
        [json!(1), json!(8), json!(20)],
        [
            json!(-1),
            json!("a"),
            json!(1.5),
            json!(4_000_000_000u32),
            json!(2000),
            huge(),
        ],
    )
}

fn messages(system: bool) -> Field {
    let user = |content: Value| json!({"role": "user", "content": content});
    let long = "It was a very long evening. ".repeat(30);
    let role = if system { "system" } else { "user" };
    field(
        "messages",
        [
            json!([user(json!("Who came to the ball?"))]),
            json!([{"role": role, "content": "Be brief."}, user(json!([{"type": "text", "text": "Who?"}]))]),
            json!([user(json!("A")), {"role": "assistant", "content": "B"}, user(json!(long))]),
            json!([user(json!("äöü \u{1F426} \u{0}"))]),
        ],
        [
            json!([]),
            json!(5),
            json!("a"),
            json!({}),
            json!([5]),
            json!([{}]),
            json!([{"role": "user"}]),
            json!([{"role": "bard", "content": "a"}]),
            json!([{"role": 5, "content": "a"}]),
            json!([user(json!(5))]),
            json!([user(json!([{"type": "image_url"}]))]),
            json!([user(json!([{"text": "a"}]))]),
            json!(null),
        ],
    )
}

/// All endpoints that compute.
pub fn endpoints() -> Vec<Endpoint> {
    let mut completions = vec![
        field(
            "prompt",
            [
                json!("It is a truth universally acknowledged, that"),
                json!(["She was", "He was"]),
                json!([5, 6, 7]),
                json!([[5], [6, 7, 8, 9]]),
                json!("Mr. Darcy. ".repeat(40)),
            ],
            [
                json!(null),
                json!({}),
                json!(5),
                json!([]),
                json!([[]]),
                json!([-1]),
                json!([1.5]),
                json!([99_999_999]),
                json!(["a", 5]),
                json!([{}]),
            ],
        ),
        limit("max_tokens"),
        field("echo", [json!(true), json!(false)], [json!(1), json!("a")]),
        field(
            "logprobs",
            [json!(0), json!(3), json!(null)],
            [json!(21), json!(-1), json!("a"), json!(true)],
        ),
        field("best_of", [json!(1), json!(null)], [json!(200), json!("a")]),
        field("suffix", [json!(""), json!(null)], [json!("x"), json!(5)]),
    ];
    completions.extend(common());
    let mut chat = vec![
        messages(true),
        limit("max_completion_tokens"),
        field(
            "logprobs",
            [json!(true), json!(false), json!(null)],
            [json!(3), json!("a")],
        ),
        field(
            "chat_template_kwargs",
            [json!({}), json!(null)],
            [json!({"no_such": 1}), json!(5), json!([])],
        ),
        field(
            "tools",
            [json!([]), json!(null)],
            [
                json!([{"type": "function", "function": {"name": "a b"}}]),
                json!([5]),
                json!(5),
                json!([{"type": "web"}]),
            ],
        ),
        field(
            "functions",
            [json!([]), json!(null)],
            [json!([{"name": "f"}]), json!(5)],
        ),
    ];
    chat.extend(common());
    let mut anthropic = vec![
        messages(false),
        limit("max_tokens"),
        field(
            "system",
            [json!("Be brief."), json!([{"type": "text", "text": "Be."}])],
            [json!(5), json!([{"type": "image"}])],
        ),
        field(
            "stop_sequences",
            [json!([]), json!(["the", "x"])],
            [json!([""]), json!(5), json!([5])],
        ),
        field(
            "mcp_servers",
            [json!([]), json!(null)],
            [json!([{"name": "a"}])],
        ),
        field(
            "thinking",
            [json!({"type": "disabled"}), json!(null)],
            [json!({"type": "sometimes"}), json!(5)],
        ),
    ];
    anthropic.extend(sampling());
    let endpoint = |path, fields| Endpoint { path, fields };
    vec![
        endpoint("/v1/completions", completions),
        endpoint("/v1/chat/completions", chat),
        endpoint("/v1/messages", anthropic),
    ]
}

impl Endpoint {
    /// A request with what is needed, and nothing else.
    pub fn least(&self) -> Value {
        json!({(self.fields[0].name): self.fields[0].right[0], (self.fields[1].name): 4})
    }

    /// A request with some of the fields. One in `wrong` is wrong.
    pub fn draw(&self, rng: &mut Rng, wrong: usize) -> Drawn {
        let mut drawn = Drawn {
            path: self.path,
            body: self.least(),
            wrong: Vec::new(),
        };
        for (i, field) in self.fields.iter().enumerate() {
            // What it needs is always there.
            if i > 1 && !rng.one_in(4) {
                continue;
            }
            let is_wrong = !field.wrong.is_empty() && rng.one_in(wrong);
            if is_wrong {
                drawn.wrong.push(field.name);
            }
            let values = if is_wrong { &field.wrong } else { &field.right };
            drawn.body[field.name] = values[rng.below(values.len())].clone();
        }
        drawn
    }
}
