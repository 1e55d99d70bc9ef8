//! The frames of published templates: which tokens end an answer, and which switches a message may spell.

use super::*;

/// The end tokens of a template, in the order of the tokenizer's.
fn ends(template: &str, added: &[(&str, bool)]) -> Vec<String> {
    let (_dir, tokenizer, format) = model_with(template, added);
    let conversation = Conversation::new(&tokenizer, format, None);
    let ends = conversation.end_tokens().iter();
    ends.map(|id| added[(id - FIRST) as usize].0.to_owned())
        .collect()
}

#[test]
fn role_tokens_that_the_template_writes_are_ends() {
    let glm = "[gMASK]<sop>{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}{% elif m.role == 'assistant' %}\
        <|assistant|>\n<think></think>\n{{ m.content.split('</think>')[-1].strip() }}{% elif m.role == 'tool' %}<|observation|>\n\
        <tool_response>\n{{ m.content }}\n</tool_response>{% elif m.role == 'system' %}<|system|>\n{{ m.content }}{% endif %}{% endfor %}\
        {% if add_generation_prompt %}<|assistant|>{% endif %}";
    let tokens = [
        ("[gMASK]", true),
        ("<sop>", true),
        ("<|system|>", true),
        ("<|user|>", true),
        ("<|assistant|>", true),
        ("<|observation|>", true),
        ("<think>", false),
        ("</think>", false),
        ("<tool_response>", false),
        ("</tool_response>", false),
        ("<|never|>", true),
    ];
    let roles = ["<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"];
    assert_eq!(ends(glm, &tokens), roles);
    // The marks of thoughts stay within answers even where they are special.
    let special = tokens.map(|(text, _)| (text, true));
    assert_eq!(ends(glm, &special), roles);
    // The token of a role may be an ordinary added token.
    let ordinary = tokens.map(|(text, _)| (text, false));
    assert_eq!(ends(glm, &ordinary), ["<|user|>"]);
}

#[test]
fn an_answer_ends_with_the_token_that_the_template_puts_after_it() {
    let chatml = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n<think>\n";
    let tokens = [
        ("<|endoftext|>", true),
        ("<|im_start|>", true),
        ("<|im_end|>", true),
        ("<think>", false),
        ("</think>", false),
    ];
    assert_eq!(ends(chatml, &tokens), ["<|im_start|>", "<|im_end|>"]);
    let deepseek = "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}{% elif m.role == 'assistant' %}\
        <|Assistant|></think>{{ m.content }}<|end of sentence|>{% else %}{{ m.content }}{% endif %}{% endfor %}<|Assistant|><think>";
    let tokens = [
        ("<|User|>", true),
        ("<|Assistant|>", true),
        ("<|end of sentence|>", true),
        ("<think>", true),
        ("</think>", true),
    ];
    assert_eq!(
        ends(deepseek, &tokens)[..3],
        ["<|User|>", "<|Assistant|>", "<|end of sentence|>"][..]
    );
}

/// A model of this template writes `<|end|><|start|>assistant` between its thoughts and its answer.
#[test]
fn tokens_that_the_model_writes_within_answers_are_no_ends() {
    let channels = "{% for m in messages %}{% if m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>\
        {% elif m.role == 'tool' %}{{ raise_exception('no call') }}{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}\
        {% endfor %}<|start|>assistant";
    let tokens = [
        ("<|start|>", true),
        ("<|end|>", true),
        ("<|message|>", true),
        ("<|channel|>", true),
        ("<|return|>", true),
    ];
    assert!(ends(channels, &tokens).is_empty());
}

#[test]
fn a_template_that_refuses_a_dialogue_has_no_ends() {
    for template in [
        "{{ raise_exception('no') }}",
        "",
        "{{ messages[0].content }}",
    ] {
        assert!(ends(template, &ADDED).is_empty(), "{template}");
    }
}

#[test]
fn switches_work_where_the_template_looks_for_them() {
    let template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>\
        {% if messages[-1].content.endswith('/nothink') or messages[-1].content.endswith('<|quiet|>') or '<|user|>' in messages[-1].content \
        %}<think>{% endif %}";
    let tokens = [
        ("<|system|>", true),
        ("<|user|>", true),
        ("<|assistant|>", true),
        ("/nothink", true),
        ("<|quiet|>", true),
        ("<think>", false),
    ];
    let (_dir, tokenizer, format) = model_with(template, &tokens);
    let counts = |text: &str| {
        let mut chat = Conversation::new(&tokenizer, format.clone(), None);
        let ids = chat.ask(text, 1000).unwrap().ids;
        tokens.map(|(token, _)| {
            let id = tokenizer.id(token).unwrap();
            ids.iter().filter(|i| **i == id).count()
        })
    };
    assert_eq!(counts("hi"), [0, 1, 1, 0, 0, 0]);
    assert_eq!(counts("hi /nothink"), [0, 1, 1, 1, 0, 1]);
    assert_eq!(counts("hi <|quiet|>"), [0, 1, 1, 0, 1, 1]);
    // Elsewhere, and for tokens of roles, the spelling is text.
    assert_eq!(counts("/nothink or not?"), [0, 1, 1, 0, 0, 0]);
    assert_eq!(counts("<|quiet|>/nothink"), [0, 1, 1, 1, 0, 1]);
    assert_eq!(
        counts("<|assistant|><|system|>x<|user|>"),
        [0, 1, 1, 0, 0, 0]
    );
    assert_eq!(counts("</nothink<think>"), [0, 1, 1, 0, 0, 0]);
}

#[test]
fn a_message_without_influence_is_an_error() {
    for (template, role) in [
        ("", "user"),
        (
            "<html><body>404 this page is not here</body></html>",
            "user",
        ),
        ("{{ messages[0].content }}", "user"),
        (
            "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}",
            "system",
        ),
    ] {
        let (_dir, tokenizer, format) = model(template);
        let mut chat = Conversation::new(&tokenizer, format, Some("Be brief.".into()));
        for message in ["hi", "", " "] {
            let error = chat.ask(message, 1000).unwrap_err().to_string();
            let says = format!("chat_template.jinja leaves out the {role} message");
            assert!(error.contains(&says), "{template}: {error}");
        }
        assert_eq!(chat.messages().len(), 1);
    }
    // A message may be changed, or decide about the text without being in it.
    for template in [
        "<|user|>{{ messages[-1].content | upper }}",
        "{{ 'yes' if messages[-1].content == 'hi' else 'no' }}",
    ] {
        let (_dir, tokenizer, format) = model(template);
        assert!(
            Conversation::new(&tokenizer, format, None)
                .ask("hi", 1000)
                .is_ok()
        );
    }
}
