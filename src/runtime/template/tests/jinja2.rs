//! Compares what published templates use with the text of jinja2 3.1.6, in the environment of transformers.

use super::rendered;

#[test]
fn expressions_have_the_text_of_jinja2() {
    let expected = [
        ("{{ '%s: %d' % ('a', 3) }}", "a: 3"),
        ("{{ '%s' % messages[0].role }}", "system"),
        (
            "{{ '%05.2f|%x|%5s|%-5s|' % (2.0, 255, 'a', 'b') }}",
            "02.00|ff|    a|b    |",
        ),
        ("{{ '%(a)s' % {'a': 1} }}", "1"),
        (
            "{{ '%s %s' % (messages[0].content, 'x' ~ 'y') }}",
            "Be brief. xy",
        ),
        ("{{ '100%%' % () }}", "100%"),
        ("{{ '%s%s' % (none, true) }}", "NoneTrue"),
        ("{{ '%s' % [1, 'a'] }}", "[1, 'a']"),
        ("{% set f = '%s-%s' %}{{ f % (1, 2) }}", "1-2"),
        (
            "{% set n = 7 %}{{ n % 4 * 2 }} {{ -n % 3 }} {{ 7.5 % n }} {{ (n + 1) % 2 == 0 }} {{ 7 % 3 }} {{ true % 2 }}",
            "6 2 0.5 True 1 1",
        ),
        ("{{ 'a' + '%s' % 1 + 'b' }}", "a1b"),
        ("{% set n = 7 %}{{ '%s' % n | string ~ 'x' }}", "7x"),
        (
            "{{ '%.2f %+d %e %c %i %o %X %#x %03d' % (3.14159, 5, 12345.678, 'x', 3, 8, 255, 255, 7) }}",
            "3.14 +5 1.234568e+04 x 3 10 FF 0xff 007",
        ),
        (
            "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}x{% endif %}{% endfor %}",
            "xx",
        ),
        (
            "{{ 'a=b=c'.partition('=') }}{{ 'a=b=c'.rpartition('=')[2] }}{{ 'abc'.partition('=') }}",
            "('a', '=', 'b=c')c('abc', '', '')",
        ),
        ("{% set a, b, c = 'x:y'.partition(':') %}{{ c }}", "y"),
        (
            "{{ 'abc'.removeprefix('a') }}{{ 'abc'.removesuffix('c') }}{{ 'abc'.removesuffix('x') }}",
            "bcababc",
        ),
        (
            "{{ 'a'.ljust(3) }}|{{ 'a'.rjust(3, '*') }}|{{ 'ab'.center(5) }}|{{ 'a'.center(4) }}|{{ '-7'.zfill(4) }}",
            "a  |**a|  ab | a  |-007",
        ),
        (
            "{{ 'Abc'.swapcase() }}{{ 'ABC'.casefold() }}{{ 'abc'.index('b') }}{{ 'abcb'.rindex('b') }}",
            "aBCabc13",
        ),
        (
            "{{ 'a b  c'.rsplit(' ', 1) }}{{ 'a b  c'.rsplit() }}{{ 'a,b,c'.rsplit(',', maxsplit=1) }}",
            "['a b ', 'c']['a', 'b', 'c']['a,b', 'c']",
        ),
        (
            "{{ 'a,b,c'.split(',', maxsplit=1) }}{{ 'a,b'.split(sep=',') }}{{ ' a  b '.split(none, 1) }}{{ ''.split() }}{{ ''.split(',') }}",
            "['a', 'b,c']['a', 'b']['a', 'b '][]['']",
        ),
        (
            "{{ 'aaa'.replace('a', 'b', 2) }}{{ 'aaa' | replace('a', 'b', 2) }}",
            "bbabba",
        ),
        (
            "{{ 'abc'.startswith('b', 1) }}{{ 'abc'.endswith('b', 0, 2) }}{{ 'ab'.startswith(('x', 'a')) }}{{ 'abcabc'.find('c', 3) }}{{ 'abc'.find('z') }}",
            "TrueTrueTrue5-1",
        ),
        (
            "{{ \"they're here\".title() }}{{ '12'.isdecimal() }}{{ [3, 1].index(1) }}",
            "They'Re HereTrue1",
        ),
        (
            "{{ {'b': 1, 'a': ['ü', none]} | tojson(ensure_ascii=True) }}",
            "{\"b\": 1, \"a\": [\"\\u00fc\", null]}",
        ),
        (
            "{{ {'b': 1, 'a': []} | tojson(separators=(',', ':')) }}",
            "{\"b\":1,\"a\":[]}",
        ),
        (
            "{{ {'b': 1, 'a': {}} | tojson(sort_keys=True) }}",
            "{\"a\": {}, \"b\": 1}",
        ),
        (
            "{{ {'b': [1, 2]} | tojson(false, 2) }}",
            "{\n  \"b\": [\n    1,\n    2\n  ]\n}",
        ),
        (
            "{{ [1] | tojson(indent='\\t') }}{{ [1] | tojson(indent=0) }}",
            "[\n\t1\n][\n1\n]",
        ),
        (
            "{{ [1e16, 1e-7, 0.0001, 1.5, -0.0, 1e22, 123456.789, 100000.0] | tojson }}",
            "[1e+16, 1e-07, 0.0001, 1.5, -0.0, 1e+22, 123456.789, 100000.0]",
        ),
        (
            "{{ {1: 'a', none: 'c', 1.5: 'd', true: 2} | tojson }}",
            "{\"1\": 2, \"null\": \"c\", \"1.5\": \"d\"}",
        ),
        (
            "{{ '\\u2028é\\x7f' | tojson(ensure_ascii=true) }}",
            "\"\\u2028\\u00e9\\u007f\"",
        ),
        (
            "{{ 1e16 }} {{ 1e-7 }} {{ 1e5 }} {{ 10 / 2 }} {{ 0.1 + 0.2 }}",
            "1e+16 1e-07 100000.0 5.0 0.30000000000000004",
        ),
        (
            "{{ {} is sequence }}{{ 'a' is sequence }}{{ [] is sequence }}{{ 1 is sequence }}{{ {} is mapping }}{{ 'a' is mapping }}",
            "TrueTrueTrueFalseTrueFalse",
        ),
        ("{{ range is callable }}{{ 1 is callable }}", "TrueFalse"),
        (
            "{% set j = joiner(', ') %}{% for x in [1, 2] %}{{ j() }}{{ x }}{% endfor %}",
            "1, 2",
        ),
        (
            "{{ '{% generation %}' }}{% raw %}{% generation %}{% endraw %}",
            "{% generation %}{% generation %}",
        ),
        (
            "{% for k, v in {'a': 1, 'b': 2}.items() %}{{ loop.index }}{{ k }}{{ v }}{% endfor %}{% for k, v in {'b': 1, 'a': 2} | dictsort %}{{ k }}{% endfor %}",
            "1a12b2ab",
        ),
        (
            "{{ messages | map(attribute='role') | join(',') }}{{ messages | rejectattr('role', 'eq', 'user') | list | length }}",
            "system,user1",
        ),
        (
            "{{ loop is defined }}{{ 'ab'[::-1] }}{{ [1, 2, 3][-2:] }}{{ 'héllo'[1:3] }}",
            "Falseba[2, 3]él",
        ),
    ];
    for (source, expected) in expected {
        assert_eq!(rendered(source), expected, "{source}");
    }
}

/// What Python refuses.
#[test]
fn wrong_operands_are_errors() {
    for source in [
        "{{ '%s %s' % 'x' }}",
        "{{ '%d' % 'x' }}",
        "{{ 1 % 0 }}",
        "{% set n = 1 %}{{ n % 0 }}",
        "{{ [] % 2 }}",
        "{{ 'a'.partition('') }}",
        "{{ 'a'.split('') }}",
        "{{ 'abc'.index('z') }}",
        "{{ [1].index(2) }}",
        "{{ 'a'.ljust(99999999999) }}",
        "{{ [1] | tojson(separators=',') }}",
        "{{ [1] | tojson(nonsense=1) }}",
    ] {
        let rendered = super::template(source).render(&super::hello());
        assert!(rendered.is_err(), "{source}: {rendered:?}");
    }
}
