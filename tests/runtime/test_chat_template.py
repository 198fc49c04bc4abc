"""Chat templates against transformers' `apply_chat_template`, and what they do with what they cannot render."""

from __future__ import annotations

import pytest
from tiny_tokenizer import tiny_tokenizer, write_tiny_tokenizer

from runtime.chat_template import ChatTemplate
from runtime.errors import ArtifactError, RequestError

CHATML = """{%- for message in messages %}
    {%- if loop.first and messages[0]['role'] != 'system' %}
        {{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""

LLAMA3 = """{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
{%- endif %}
{{- "Today Date: " + date_string + "\n\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

MISTRAL = """{{ bos_token }}{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'] + ' [/INST]' }}
    {% elif message['role'] == 'assistant' %}
        {% generation %}
{{ message['content'] + eos_token }}
        {% endgeneration %}
    {% else %}
        {% continue %}
    {% endif %}
{% endfor %}"""

NAMESPACES = """{% set ns = namespace(n=0, last='') %}{% for m in messages %}{% set ns.n = ns.n + 1 %}
{% if ns.n > 3 %}{% break %}{% endif %}
{{ ns.n }}:{{ m.get('reasoning_content', '') }}|{{ m.content if m.content is string else m.content[-1].text }};
{% endfor %}{{ dict(a=1) | tojson }} {{ strftime_now('%Y')|length }}{% if flag is defined %}{{ flag }}{% endif %}
{{ {'html': '<b>&é'} | tojson }}"""

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "namespaces": NAMESPACES}

USER = {"role": "user", "content": "  What is <the> answer? é\n"}
ASSISTANT = {"role": "assistant", "content": "It is 42. "}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "x": "<é>"}}}]
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": [1, "é"]}}}]}
CHATS = {
    "one": [USER],
    "three": [USER, ASSISTANT, USER],
    "system": [{"role": "system", "content": "Be brief."}, USER, ASSISTANT],
    "five": [USER, ASSISTANT, USER, ASSISTANT, USER],
    "tool": [USER, CALL, {"role": "tool", "content": {"result": 1}}, USER],
    "none-values": [{**USER, "tool_calls": None, "name": None}],
    "reasoning": [USER, {**ASSISTANT, "reasoning": "Hmm."}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
}


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    folder = write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def special_tokens():
    return tiny_tokenizer().special_tokens


def outcome(render):
    try:
        return render()
    except Exception:
        return "refused"


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("mode", ["plain", "generation", "continue"])
def test_equals_transformers(hf, special_tokens, name, chat, mode):
    options = {"add_generation_prompt": mode == "generation", "continue_final_message": mode == "continue"}
    template = ChatTemplate(TEMPLATES[name], special_tokens)
    for tools in (None, TOOLS):
        expected = outcome(
            lambda tools=tools: hf.apply_chat_template(
                CHATS[chat], tools=tools, chat_template=TEMPLATES[name], tokenize=False, flag="F", **options
            )
        )
        got = outcome(lambda tools=tools: template.render(CHATS[chat], tools=tools, flag="F", **options))
        assert got == expected


def test_most_conversations_render(special_tokens):
    """The comparison above is not one of refusals."""
    refused = [
        (name, chat)
        for name in TEMPLATES
        for chat in CHATS
        if outcome(lambda n=name, c=chat: ChatTemplate(TEMPLATES[n], special_tokens).render(CHATS[c])) == "refused"
    ]
    assert len(refused) <= 8, refused


def test_the_models_own_template_and_messages_are_left_as_they_are(tmp_path):
    from runtime.tokenizer import Tokenizer

    folder = write_tiny_tokenizer(tmp_path)
    template = ChatTemplate.load(folder, Tokenizer.load(folder))
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    text = template.render(messages, continue_final_message=True)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes"
    assert messages[-1] == {"role": "assistant", "content": "Yes"}


def test_templates_by_name(tmp_path, special_tokens):
    template = ChatTemplate({"default": "plain", "tool_use": "tools:{{ tools|length }}"}, special_tokens)
    assert template.render([USER]) == "plain"
    assert template.render([USER], tools=TOOLS) == "tools:1"
    assert template.source == "plain"
    with pytest.raises(RequestError, match="none is the default"):
        ChatTemplate({"rag": "x"}).render([USER])


def test_no_template(tmp_path):
    from runtime.tokenizer import Tokenizer

    folder = write_tiny_tokenizer(tmp_path, kind="wordpiece")
    assert ChatTemplate.load(folder, Tokenizer.load(folder)) is None


def test_case_18_exactly_one_bos():
    """A templated prompt that already holds BOS gets no second one, whichever way it is encoded."""
    tokenizer = tiny_tokenizer("byte_fallback")
    template = ChatTemplate("{{ bos_token }}{{ messages[0].content }}", tokenizer.special_tokens)
    text = template.render([{"role": "user", "content": "The quick fox"}])
    for add_special_tokens in (True, False):
        ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        assert ids.count(tokenizer.bos_token_id) == 1
        assert ids[0] == tokenizer.bos_token_id


def test_case_19_no_messages():
    with pytest.raises(RequestError, match="at least one message") as caught:
        ChatTemplate("x").render([])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("source", "messages", "match"),
    [
        (MISTRAL, [ASSISTANT], "Conversation roles must alternate"),
        (CHATML, [{"content": "no role"}], "cannot render"),
        (CHATML, ["text"], "each message must be an object"),
        ("{{ messages.__class__.__mro__ }}", [USER], "cannot render"),
        ("{{ ''.__class__.__subclasses__() }}", [USER], "cannot render"),
        ("{{ messages.append(1) }}", [USER], "cannot render"),
        ("{% set ns = namespace(_x=1) %}", [USER], "cannot render"),
        ("{% for i in range(999999) %}{% endfor %}", [USER], "cannot render"),
        ("{{ 1 / 0 }}", [USER], "cannot render"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", [USER], "cannot render"),
    ],
)
def test_what_it_refuses(source, messages, match):
    with pytest.raises(RequestError, match=match):
        ChatTemplate(source).render(messages)


@pytest.mark.parametrize(
    ("messages", "options", "match"),
    [
        ([USER], {"add_generation_prompt": True}, "exclude each other"),
        ([{"role": "assistant"}], {}, "no content"),
        ([{"role": "assistant", "content": [{"type": "image"}]}], {}, "no text"),
    ],
)
def test_continue_final_message_refusals(messages, options, match):
    with pytest.raises(RequestError, match=match):
        ChatTemplate(CHATML).render(messages, continue_final_message=True, **options)


def test_a_template_that_does_not_compile_is_the_artifacts_fault():
    with pytest.raises(ArtifactError, match="line 1"):
        ChatTemplate("{% if %}")
