//! Writes the grammar of an answer that must have a form: JSON that a schema accepts, or tool calls.

use serde_json::{Map, Value, json};

use super::{CallFormat, Dialect, Section, Tool};
use crate::runtime::grammar::{Grammar, GrammarError, embedded_schema};
use crate::runtime::tokenizer::Tokenizer;

/// What an answer must be: one of these.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Form {
    /// JSON that this schema accepts.
    pub schema: Option<Value>,
    /// Calls of these tools.
    pub tools: Vec<Tool>,
    /// Whether more than one call is allowed.
    pub several: bool,
}

/// White space that models write between tags.
const SPACE: &str = r"SPACE: /[ \t\r\n]{1,4}/";
/// Text up to the next tag.
const TEXT: &str = r"TEXT: /(?s:.+)/";

impl Dialect {
    /// The grammar of an answer of this form to `prompt`, the rendered text. Reasoning may come first. `None` for calls that the dialect lacks.
    ///
    /// # Errors
    /// A schema is too large.
    pub fn grammar(
        &self,
        form: &Form,
        prompt: &str,
        tokenizer: &Tokenizer,
    ) -> Result<Option<Grammar>, GrammarError> {
        let prompt = prompt.trim_end();
        let thinks = self.thinks && !prompt.ends_with("</think>");
        if let (Some(schema), [], false) = (&form.schema, &form.tools[..], thinks) {
            return Ok(Some(Grammar::JsonSchema(schema.clone())));
        }
        let mut lark = Lark {
            tokenizer,
            rules: vec![SPACE.into(), TEXT.into()],
        };
        let mut answers = Vec::new();
        if let Some(schema) = &form.schema {
            answers.push(format!("%json {}", embedded_schema(schema)?));
        }
        if !form.tools.is_empty() {
            let Some(format) = self.calls else {
                return Ok(None);
            };
            answers.push(lark.calls(format, &form.tools, form.several)?);
        }
        let names: Vec<String> = (answers.iter().enumerate())
            .map(|(n, answer)| lark.rule(&format!("answer{n}"), answer))
            .collect();
        let answer = format!("SPACE? ({}) SPACE?", names.join(" | "));
        let (open, thought) = (lark.tag("<think>"), lark.until("</think>"));
        let thought = match prompt.ends_with("<think>") {
            _ if !thinks => String::new(),
            true => format!("{thought} "),
            false => format!("({open} {thought})? "),
        };
        let rules = lark.rules.join("\n");
        Ok(Some(Grammar::Lark(format!(
            "start: {thought}{answer}\n{rules}\n"
        ))))
    }
}

/// A grammar in the making.
struct Lark<'t> {
    tokenizer: &'t Tokenizer,
    rules: Vec<String>,
}

impl Lark<'_> {
    /// Adds a rule, and returns its name.
    fn rule(&mut self, name: &str, body: &str) -> String {
        self.rules.push(format!("{name}: {body}"));
        name.to_owned()
    }

    /// A tag: a token of its own, or text.
    fn tag(&self, tag: &str) -> String {
        match self.tokenizer.id(tag) {
            Some(id) => format!("<[{id}]>"),
            None => quoted(tag),
        }
    }

    /// Any text, and the tag that ends it.
    fn until(&mut self, tag: &str) -> String {
        if self.tokenizer.id(tag).is_some() {
            return format!("TEXT? {}", self.tag(tag));
        }
        let name = format!("until{}", self.rules.len());
        self.rules
            .push(format!("{name}[suffix={}]: /(?s:.*)/", quoted(tag)));
        name
    }

    /// Adds the rules of one call of any of the tools, or of several.
    fn calls(
        &mut self,
        format: CallFormat,
        tools: &[Tool],
        several: bool,
    ) -> Result<String, GrammarError> {
        let mut calls = Vec::new();
        for (n, tool) in tools.iter().enumerate() {
            let body = match format {
                CallFormat::Pairs => self.pairs(n, tool)?,
                CallFormat::Json => {
                    let head = format!("{{\"name\": {}, \"arguments\": ", Value::from(&*tool.name));
                    let arguments = self.arguments(n, tool)?;
                    format!("{} {arguments} \"}}\"", quoted(&head))
                }
                CallFormat::Section(section) => self.section_call(section, n, tool)?,
            };
            calls.push(self.rule(&format!("tool{n}"), &body));
        }
        let [open, close] = match format {
            CallFormat::Section(section) => [section.call, section.called],
            CallFormat::Pairs | CallFormat::Json => ["<tool_call>", "</tool_call>"],
        };
        let (open, close) = (self.tag(open), self.tag(close));
        let calls = calls.join(" | ");
        let call = match format {
            CallFormat::Section(_) => self.rule("call", &format!("{open} ({calls}) {close}")),
            CallFormat::Pairs | CallFormat::Json => {
                let body = format!("{open} SPACE? ({calls}) SPACE? {close}");
                self.rule("call", &body)
            }
        };
        let calls = match several {
            true => format!("{call} (SPACE? {call})*"),
            false => call,
        };
        Ok(match format {
            CallFormat::Section(section) => {
                let (open, close) = (self.tag(section.open), self.tag(section.close));
                format!("{open} {calls} {close}")
            }
            CallFormat::Pairs | CallFormat::Json => calls,
        })
    }

    /// The rule of a tool's arguments as JSON.
    fn arguments(&mut self, n: usize, tool: &Tool) -> Result<String, GrammarError> {
        let mut parameters = tool.parameters.clone();
        // Without it, any JSON would do.
        parameters.insert("type".into(), "object".into());
        let schema = embedded_schema(&Value::Object(parameters))?;
        Ok(self.rule(&format!("arguments{n}"), &format!("%json {schema}")))
    }

    /// The rule of a call in a section.
    fn section_call(
        &mut self,
        section: &Section,
        n: usize,
        tool: &Tool,
    ) -> Result<String, GrammarError> {
        let (head, numbered, [before, after]) = section.frame(&tool.name);
        let arguments = self.arguments(n, tool)?;
        let index = if numbered { " /[0-9]{1,3}/" } else { "" };
        let text = |text: &str| match text {
            "" => String::new(),
            text => quoted(text),
        };
        Ok(format!(
            "{}{index} {} {} {arguments} {}",
            quoted(&head),
            self.tag(section.separator),
            text(&before),
            text(&after)
        ))
    }

    /// The rule of a call as pairs of tags: required properties, and others in the order of the schema.
    fn pairs(&mut self, n: usize, tool: &Tool) -> Result<String, GrammarError> {
        let schema = &tool.parameters;
        let required = schema.get("required").and_then(Value::as_array);
        let is_required =
            |key: &str| required.is_some_and(|names| names.iter().any(|name| name == key));
        let mut body = quoted(&tool.name);
        let empty = Map::new();
        let properties = schema.get("properties").and_then(Value::as_object);
        for (k, (key, property)) in properties.unwrap_or(&empty).iter().enumerate() {
            let value = self.value(schema, property)?;
            let pair = format!(
                "SPACE? {} {} {} SPACE? {} {value}",
                self.tag("<arg_key>"),
                quoted(key),
                self.tag("</arg_key>"),
                self.tag("<arg_value>"),
            );
            let pair = self.rule(&format!("pair{n}_{k}"), &pair);
            body += &match is_required(key) {
                true => format!(" {pair}"),
                false => format!(" {pair}?"),
            };
        }
        Ok(body)
    }

    /// The value of a property, and the tag that ends it. Strings are written as they are, other values as JSON.
    fn value(
        &mut self,
        schema: &Map<String, Value>,
        property: &Value,
    ) -> Result<String, GrammarError> {
        let texts = |values: &[Value]| -> Option<Vec<String>> {
            values
                .iter()
                .map(|value| Some(quoted(value.as_str()?)))
                .collect()
        };
        let close = self.tag("</arg_value>");
        let options = property.get("enum").and_then(Value::as_array);
        if let Some(texts) = options.and_then(|values| texts(values)) {
            return Ok(format!("({}) {close}", texts.join(" | ")));
        }
        if property.get("type").is_some_and(|kind| kind == "string") {
            return Ok(self.until("</arg_value>"));
        }
        let mut property = property.clone();
        for definitions in ["$defs", "definitions"] {
            if let (Some(all), Some(own)) = (schema.get(definitions), property.as_object_mut()) {
                own.insert(definitions.into(), all.clone());
            }
        }
        let value = format!("value{}", self.rules.len());
        let value = self.rule(&value, &format!("%json {}", embedded_schema(&property)?));
        Ok(format!("{value} {close}"))
    }
}

/// A text as Lark writes it.
fn quoted(text: &str) -> String {
    json!(text).to_string()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use rand_chacha::ChaCha8Rng;
    use rand_chacha::rand_core::{RngCore, SeedableRng};

    use super::*;
    use crate::runtime::dialect::Part;
    use crate::runtime::grammar::Grammars;
    use crate::runtime::sample::{Sampler, Sampling};

    const VOCAB: usize = 704;

    fn tokenizer() -> Tokenizer {
        let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/chat");
        Tokenizer::load(Path::new(dir)).unwrap().unwrap()
    }

    fn tools() -> Vec<Tool> {
        let tool = |name: &str, parameters: Value| Tool {
            name: name.into(),
            parameters: parameters.as_object().unwrap().clone(),
        };
        vec![
            tool(
                "weather",
                json!({
                    "type": "object",
                    "properties": {
                        "place": {"type": "string", "maxLength": 8},
                        "unit": {"type": "string", "enum": ["C", "F"]},
                        "days": {"type": "integer", "minimum": 1, "maximum": 14},
                        "when": {"$ref": "#/$defs/when"},
                    },
                    "required": ["unit", "days"],
                    "additionalProperties": false,
                    "$defs": {"when": {"enum": ["now", "later"]}},
                }),
            ),
            tool(
                "time",
                json!({"type": "object", "properties": {}, "additionalProperties": false}),
            ),
        ]
    }

    /// An answer drawn from random logits within the grammar.
    fn draw(dialect: Dialect, form: &Form, prompt: &str, seed: u64) -> String {
        let tokenizer = tokenizer();
        let grammars = Grammars::new(&tokenizer, VOCAB, &[0]).unwrap();
        let grammar = dialect.grammar(form, prompt, &tokenizer).unwrap().unwrap();
        let constraint = grammars.compile(&grammar).unwrap();
        let sampling = Sampling {
            temperature: 1.0,
            seed,
            ..Sampling::default()
        };
        let mut sampler = Sampler::new(sampling).constrained(constraint);
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let mut ids: Vec<u32> = Vec::new();
        let tags = ["</arg_value>", "</think>"].map(|tag| tokenizer.encode_plain(tag).unwrap());
        while ids.last() != Some(&0) {
            assert!(ids.len() < 20_000, "the answer does not end");
            let forced = sampler.forced(usize::MAX).unwrap();
            if !forced.is_empty() {
                ids.extend(forced);
                continue;
            }
            let mut logits: Vec<f32> = (0..VOCAB)
                .map(|_| (random.next_u32() % 64) as f32 / 16.0)
                .collect();
            // Random tokens do not spell the tag that ends a text.
            for tag in &tags {
                let spelled = (1..tag.len()).rev().find(|n| ids.ends_with(&tag[..*n]));
                if spelled.is_some() || random.next_u32().is_multiple_of(8) {
                    logits[tag[spelled.unwrap_or(0)] as usize] += 100.0;
                }
            }
            ids.push(sampler.sample(&logits).unwrap());
        }
        tokenizer.decode(&ids).unwrap()
    }

    /// Name and arguments of each call, and the content.
    fn split(dialect: Dialect, prompt: &str, text: &str) -> (Vec<(String, String)>, String) {
        let (mut calls, mut content) = (Vec::new(), String::new());
        let mut splitter = dialect.splitter(prompt, tools());
        let parts = splitter.push(text);
        for part in parts.into_iter().chain(splitter.finish()) {
            match part {
                Part::Call { name, .. } => calls.push((name, String::new())),
                Part::Arguments { index, text } => calls[index].1 += &text,
                Part::Content(text) => content += &text,
                Part::Reasoning(_) => {}
            }
        }
        (calls, content)
    }

    #[test]
    fn required_calls_are_calls() {
        let sections = crate::runtime::dialect::section::ALL.map(CallFormat::Section);
        for format in [CallFormat::Pairs, CallFormat::Json]
            .into_iter()
            .chain(sections)
        {
            let dialect = Dialect {
                thinks: false,
                calls: Some(format),
            };
            for seed in 0..40 {
                let several = seed % 2 == 0;
                let form = Form {
                    schema: None,
                    tools: tools(),
                    several,
                };
                let text = draw(dialect, &form, "", seed);
                let (calls, content) = split(dialect, "", &text);
                assert_eq!(content, "", "{text}");
                assert!(!calls.is_empty() && (several || calls.len() == 1), "{text}");
                for (name, arguments) in calls {
                    let arguments: Value = serde_json::from_str(&arguments).unwrap();
                    let keys: Vec<&String> = arguments.as_object().unwrap().keys().collect();
                    match name.as_str() {
                        "weather" => {
                            let days = arguments["days"].as_i64().unwrap();
                            assert!((1..=14).contains(&days), "{text}");
                            assert!(["C", "F"].contains(&arguments["unit"].as_str().unwrap()));
                            if let Some(when) = arguments.get("when") {
                                assert!(["now", "later"].contains(&when.as_str().unwrap()));
                            }
                        }
                        "time" => assert!(keys.is_empty(), "{text}"),
                        other => panic!("{other} in {text}"),
                    }
                }
            }
        }
    }

    #[test]
    fn an_answer_may_reason_before_its_form() {
        let dialect = Dialect {
            thinks: true,
            calls: None,
        };
        let form = Form {
            schema: Some(json!({"type": "integer", "minimum": 0, "maximum": 99})),
            ..Form::default()
        };
        let mut thought = 0;
        for seed in 0..20 {
            for prompt in ["<think>\n", "<|assistant|>", "<think></think>"] {
                let text = draw(dialect, &form, prompt, seed);
                thought += usize::from(text.contains("</think>"));
                let (_, content) = split(dialect, prompt, &text);
                assert!(content.parse::<u32>().is_ok_and(|n| n < 100), "{text:?}");
            }
        }
        assert!(thought >= 20);
    }

    #[test]
    fn an_answer_may_be_a_call_or_json() {
        let dialect = Dialect {
            thinks: false,
            calls: Some(CallFormat::Json),
        };
        let form = Form {
            schema: Some(json!({"const": "no"})),
            tools: tools(),
            several: false,
        };
        let (mut called, mut said) = (0, 0);
        for seed in 0..30 {
            let (calls, content) = split(dialect, "", &draw(dialect, &form, "", seed));
            assert!(
                calls.len() == 1 && content.is_empty() || calls.is_empty() && content == "\"no\""
            );
            called += calls.len();
            said += usize::from(calls.is_empty());
        }
        assert!(called > 0 && said > 0);
    }

    #[test]
    fn arguments_without_a_schema_are_an_object() {
        let dialect = Dialect {
            thinks: false,
            calls: Some(CallFormat::Json),
        };
        let tool = Tool {
            name: "any".into(),
            parameters: Map::new(),
        };
        let form = Form {
            tools: vec![tool],
            ..Form::default()
        };
        let tokenizer = tokenizer();
        let grammar = dialect.grammar(&form, "", &tokenizer).unwrap().unwrap();
        let grammars = Grammars::new(&tokenizer, VOCAB, &[0]).unwrap();
        let mut constraint = grammars.compile(&grammar).unwrap();
        let text = "<tool_call>{\"name\": \"any\", \"arguments\": ";
        for id in tokenizer.encode_plain(text).unwrap() {
            constraint.accept(id).unwrap();
        }
        let next = |text: &str| tokenizer.encode_plain(text).unwrap()[0];
        assert!(constraint.clone().accept(next("false")).is_err());
        assert!(constraint.accept(next("{")).is_ok());
    }

    #[test]
    fn a_dialect_without_calls_has_no_form_of_calls() {
        let form = Form {
            tools: tools(),
            ..Form::default()
        };
        let grammar = Dialect::default().grammar(&form, "", &tokenizer());
        assert_eq!(grammar, Ok(None));
    }
}
