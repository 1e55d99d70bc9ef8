use serde_json::json;

use super::*;

mod jinja2;

fn template(source: &str) -> ChatTemplate {
    let tokens = vec![("bos_token", "<s>".to_owned())];
    ChatTemplate::new(source.to_owned(), "t.jinja".into(), tokens).unwrap()
}

fn hello() -> Vec<Message> {
    vec![
        Message::new(Role::System, "Be brief."),
        Message::new(Role::User, " Hello <b> & 'you' "),
    ]
}

fn rendered(source: &str) -> String {
    template(source).render(&hello()).unwrap()
}

#[test]
fn messages_are_put_in_order() {
    let source = "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n{{ m['content'] }}{% endfor %}\n\
                  {% if add_generation_prompt %}<|assistant|>{% endif %}\n";
    assert_eq!(
        rendered(source),
        "<s><|system|>\nBe brief.<|user|>\n Hello <b> & 'you' <|assistant|>"
    );
}

#[test]
fn what_templates_expect_is_there() {
    for (source, expected) in [
        ("{{ messages[1].content.strip() }}", "Hello <b> & 'you'"),
        ("{{ messages[1].content | trim }}", "Hello <b> & 'you'"),
        (
            "{{ messages[0].content.split(' ')[-1].rstrip('.') }}",
            "brief",
        ),
        ("{{ messages[0]['content'].startswith('Be') }}", "True"),
        (
            "{{ 'x' if tools is defined and tools is not none else 'none' }}",
            "none",
        ),
        (
            "{{ enable_thinking is defined }}{{ undefined_thing }}",
            "False",
        ),
        (
            "{{ {'a': [1, 'ü<'], 'b': none} | tojson }}",
            "{\"a\": [1, \"ü<\"], \"b\": null}",
        ),
        (
            "{{ [1] | tojson(indent=2, ensure_ascii=False) }}",
            "[\n  1\n]",
        ),
        (
            "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}",
            "user",
        ),
        (
            "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
            "2",
        ),
        (
            "{{ messages[1:] | length }}{{ messages[::-1][0].role }}",
            "1user",
        ),
        ("{%- generation -%} a {%- endgeneration %}", "a"),
        (
            "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
            "1",
        ),
        (
            "{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f('a') + 'b' }}",
            "[a]b",
        ),
        ("{{ strftime_now('%Y') | length }}", "4"),
    ] {
        assert_eq!(rendered(source), expected, "{source}");
    }
}

#[test]
fn variables_are_given_by_name() {
    let mut template = template("{{ enable_thinking }} {{ level }}");
    template.set("enable_thinking", "False").unwrap();
    template.set("level", "low").unwrap();
    assert_eq!(template.render(&[]).unwrap(), "False low");
}

#[test]
fn a_template_may_refuse() {
    let source = "{% if messages[0].role == 'system' %}\n{{ raise_exception('No system message!') }}{% endif %}";
    let error = template(source).render(&hello()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the chat template in t.jinja refuses these messages: No system message!"
    );
}

#[test]
fn a_tag_whose_ends_overlap_is_a_syntax_error() {
    let path = PathBuf::from("t.jinja");
    let refused = ChatTemplate::new("{%} {{ messages }}".into(), path, Vec::new());
    assert!(matches!(refused, Err(TemplateError::Invalid { .. })));
}

#[test]
fn a_template_that_fails_says_where() {
    let error = template("\n{{ messages[0].content.nonsense() }}")
        .render(&hello())
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("t.jinja fails") && error.contains("line 2"),
        "{error}"
    );
    for source in [
        "{% if %}",
        "{{",
        "{% for m in messages %}",
        "{{ 1 | nonsense }}",
    ] {
        let error = ChatTemplate::new(source.into(), "t.jinja".into(), vec![])
            .and_then(|template| template.render(&hello()))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("t.jinja") && !error.contains('\n'),
            "{error}"
        );
    }
}

/// A namespace is the only value that can be put into itself.
#[test]
fn what_contains_itself_is_not_printed() {
    let itself = "{% set ns = namespace() %}{% set ns.x = [{'y': ns}] %}";
    // Every list has the one before it twice.
    let many = "{% set ns = namespace(x=[1]) %}{% for a in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}";
    for end in ["{{ ns }}", "{{ ns.x }}", "{{ [1, ns] }}", "{{ {'a': ns} }}"] {
        for begin in [itself, many] {
            let error = template(&format!("{begin}\n{end}")).render(&hello());
            let error = error.unwrap_err().to_string();
            let says = ["t.jinja fails", "contains itself", "line 2"];
            assert!(says.iter().all(|part| error.contains(part)), "{error}");
        }
    }
    let error = template(&format!("{itself}{{{{ ns | tojson }}}}")).render(&hello());
    assert!(error.unwrap_err().to_string().contains("too large"));
    assert_eq!(rendered(&format!("{itself}{{{{ ns.x | length }}}}")), "1");
    // Iterators that know no length are not used up.
    assert_eq!(
        rendered("{% set a = [[1, 'x'], {'k': none}] %}{{ a }}"),
        "[[1, 'x'], {'k': None}]"
    );
}

/// As many levels as a template has bytes: each is read, compiled and dropped without overflowing the stack. (Chains that the engine
/// tries to fold take the square of their length, and are for the tests of the binary.)
#[test]
fn a_deep_expression_is_no_harm() {
    let most = (source::MAX_BYTES - 100) as usize;
    for (first, link, last, bytes) in [
        ("", "(", "1", most),
        ("", "[", "1", most),
        ("", "{1:", "1", most),
        ("", "1 if x else ", "1", most),
        ("", "-", "1", most),
        ("", "not ", "1", most),
        ("1", "+1", "", most),
        ("x", ".x", "", most),
        ("x", "()", "", most),
        ("x", "[1]", "", most),
        ("x", "[:]", "", most),
        ("x", "|e", "", most),
        ("x", " is x", "", most),
        ("1", "**1", "", most / 50),
        ("x", "+1", "", most / 50),
        ("x", "==x", "", most / 50),
        ("x", " or x", "", most / 50),
        ("", "-", "x", most / 50),
        ("", "not ", "x", most / 50),
    ] {
        let links = link.repeat(bytes / link.len());
        either(&format!("{{{{ {first}{links}{last} }}}}"));
    }
    let elif = "{% elif x %}".repeat(most / 12);
    either(&format!("{{% if x %}}{elif}{{% endif %}}"));
}

/// Whatever becomes of it, it is a text or an error.
fn either(source: &str) {
    let read = ChatTemplate::new(source.to_owned(), "t.jinja".into(), vec![]);
    if let Err(error) = read.and_then(|template| template.render(&hello())) {
        let error = error.to_string();
        assert!(
            error.contains("t.jinja") && error.len() < 1000,
            "{error:.200}"
        );
    }
}

/// Lists in lists, as deep as there is fuel for: they are taken apart without overflowing the stack.
#[test]
fn a_deep_value_is_no_harm() {
    for end in [
        "",
        "{{ ns.s }}",
        "{{ ns.s | tojson }}",
        "{{ ns.s == [ns.s] }}",
    ] {
        let source = "{% set ns = namespace(s=[]) %}{% for a in range(99999) %}{% set ns.s = [ns.s] %}{% endfor %}";
        let _ = template(&format!("{source}{end}")).render(&hello());
    }
}

/// Each of these would run for ever, or fill the memory, or the stack. (What only the watch stops goes on in a thread; it is for the tests of
/// the binary.)
#[test]
fn a_hostile_template_is_stopped() {
    let nested = format!("{{{{ {}1{} }}}}", "[".repeat(50_000), "]".repeat(50_000));
    let deep = format!(
        "{}{}",
        "{% if true %}".repeat(20_000),
        "{% endif %}".repeat(20_000)
    );
    let hostile = [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
        "{{ 'x' * 1000000000000 }}",
        "{% for a in range(1000) %}{{ 'x' * 10000000 }}{% endfor %}",
        "{% set ns = namespace(s='xxxxxxxx') %}{% for a in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s='xxxxxxxx') %}{% for a in range(99) %}{% set ns.s = ns.s.replace('x', 'xx') %}{% endfor %}",
        "{% set ns = namespace(s='xxxxxxxx') %}{% for a in range(99) %}{% set ns.s = '%s%s' | format(ns.s, ns.s) %}{% endfor %}",
        "{% set ns = namespace(s='xxxxxxxx') %}{% for a in range(99) %}{% set ns.s = ns.s.join([ns.s, ns.s, ns.s]) %}{% endfor %}",
        "{% set ns = namespace(s=[1, 2, 3]) %}{% for a in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s | tojson }}",
        "{% set ns = namespace(s=[1, 2, 3]) %}{% for a in range(99) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s | tojson }}",
        "{% set ns = namespace(s=[1, 2, 3]) %}{% for a in range(99) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s }}",
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
        "{{ '%999999999d' | format(1) }}",
        "{{ 'x' | indent(999999999999) }}",
        "{{ 2 ** 99999999999 }}",
        &nested,
        &deep,
    ];
    for source in hostile {
        let result = ChatTemplate::new(source.to_owned(), "t.jinja".into(), vec![])
            .and_then(|template| template.render(&hello()));
        let shown: String = source.chars().take(100).collect();
        let error = result.expect_err(&shown).to_string();
        assert!(error.len() < 1000, "{shown}: {error:.200}");
    }
}

#[test]
fn long_conversations_are_no_attack() {
    let source = "{% for m in messages %}{% for other in messages %}{% endfor %}<|{{ m.role }}|>{{ m.content.strip() }}{% endfor %}";
    let messages: Vec<Message> = (0..1000)
        .map(|_| Message::new(Role::User, "word ".repeat(200)))
        .collect();
    assert!(template(source).render(&messages).is_ok());
    let book = [Message::new(Role::User, "word ".repeat(4_000_000))];
    assert!(template(source).render(&book).unwrap().len() > 19_000_000);
}

#[test]
fn where_a_template_comes_from() {
    let dir = tempfile::tempdir().unwrap();
    let load = || ChatTemplate::load(dir.path()).map(|t| t.render(&[]).unwrap());
    let missing = load().unwrap_err().to_string();
    for name in ["chat_template.jinja", "tokenizer_config.json"] {
        assert!(missing.contains(name), "{missing}");
    }
    let config = dir.path().join("tokenizer_config.json");
    let write = |value: serde_json::Value| std::fs::write(&config, value.to_string()).unwrap();
    write(json!({"chat_template": "{{ eos_token }} config", "eos_token": {"content": "</s>"}}));
    assert_eq!(load().unwrap(), "</s> config");
    write(
        json!({"chat_template": [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]}),
    );
    assert_eq!(load().unwrap(), "d");
    write(json!({"chat_template": [{"name": "rag", "template": "r"}]}));
    let error = load().unwrap_err().to_string();
    assert!(
        error.contains("no template named default, only: rag"),
        "{error}"
    );
    write(json!({"chat_template": 7}));
    let error = load().unwrap_err().to_string();
    assert!(error.contains("chat_template is a number"), "{error}");
    write(json!({"chat_template": "x".repeat(300 << 10)}));
    let error = load().unwrap_err().to_string();
    assert!(
        error.contains("chat_template is larger than 256 KiB"),
        "{error}"
    );
    let file = dir.path().join(source::FILE);
    std::fs::write(&file, "file").unwrap();
    assert_eq!(load().unwrap(), "file");
    std::fs::write(&file, [0xff, 0xfe]).unwrap();
    assert!(load().unwrap_err().to_string().contains(source::FILE));
    std::fs::write(&file, vec![b'x'; 2 << 20]).unwrap();
    assert!(
        load()
            .unwrap_err()
            .to_string()
            .contains("larger than 256 KiB")
    );
    std::fs::remove_file(&file).unwrap();
    std::fs::create_dir(&file).unwrap();
    assert!(
        load()
            .unwrap_err()
            .to_string()
            .contains("not a regular file")
    );
}
