"""Chat templates in the manner of the families that people train, written for these tests.

§ and ¶ stand for `{% generation %}` and `{% endgeneration %}`: without them a template is as models
publish it, with them it says itself what is learnt. Around them is no white space, so that both
give the same text.
"""

from dataclasses import dataclass, field

OPEN, CLOSE = "{% generation %}", "{% endgeneration %}"


@dataclass(frozen=True, kw_only=True)
class Family:
    """A template and the conversations that it takes. `tags` are thoughts within content,
    `thoughts` those beside it, `media` is the pad token that it writes for an image."""

    marked: str
    tags: bool = False
    thoughts: bool = False
    calls: bool = False
    strict_roles: bool = False
    parts: bool = False
    media: str | None = None
    config: dict[str, str] = field(default_factory=lambda: {"eos_token": "<|im_end|>"})

    @property
    def own_marks(self) -> str:
        return self.marked.replace("§", OPEN).replace("¶", CLOSE)

    @property
    def published(self) -> str:
        return self.marked.replace("§", "").replace("¶", "")


_CALLS = """{%- for call in m.tool_calls or [] -%}{%- if call.function -%}
{%- set call = call.function -%}{%- endif -%}{%- if not loop.first or words -%}{{ '\\n' }}
{%- endif -%}{{- '<tool_call>\\n' ~ (call | tojson) ~ '\\n</tool_call>' -}}{%- endfor -%}"""
_TOOLS = """{%- if tools -%}{{- '<|im_start|>system\\n' -}}{%- if messages[0].role == 'system' -%}
{{- messages[0].content ~ '\\n\\n' -}}{%- endif -%}{{- 'Tools:' -}}{%- for tool in tools -%}
{{- '\\n' ~ (tool | tojson) -}}{%- endfor -%}{{- '<|im_end|>\\n' -}}
{%- elif messages[0].role == 'system' -%}
{{- '<|im_start|>system\\n' ~ messages[0].content ~ '<|im_end|>\\n' -}}{%- endif -%}"""
_PROMPT = "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
_ANSWERS = """{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}
{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\\n<tool_response>\\n' ~ m.content ~ '\\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\\n' -}}
{%- endif -%}"""

# As Qwen2.5 has it: a system prompt of its own, tools and their answers as the user's.
DEFAULT_SYSTEM = (
    """{%- if not tools and messages[0].role != 'system' -%}
{{- '<|im_start|>system\\nYou are a warm cat.<|im_end|>\\n' -}}{%- endif -%}"""
    + _TOOLS
    + "{%- for m in messages -%}{%- if m.role == 'tool' -%}"
    + _ANSWERS
    + """{%- elif m.role == 'assistant' -%}{{- '<|im_start|>assistant\\n' -}}§
{%- set words = m.content -%}{{- words -}}"""
    + _CALLS
    + """{{- '<|im_end|>' -}}¶{{- '\\n' -}}{%- elif not (loop.first and m.role == 'system') -%}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}{%- endif -%}{%- endfor -%}"""
    + _PROMPT
)

# As Qwen3 has it: thoughts are taken out of what comes before the last question, and an empty
# thought is put where the last turn has none.
_LAST_QUESTION = """{%- set ns = namespace(last=-1) -%}{%- for m in messages -%}
{%- if m.role == 'user' and not m.content.startswith('<tool_response>') -%}
{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"""
_SPLIT = """{%- set words = m.content -%}{%- set mind = '' -%}
{%- if m.reasoning_content is string -%}{%- set mind = m.reasoning_content -%}
{%- elif '</think>' in words -%}
{%- set mind = words.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') -%}
{%- set words = words.split('</think>')[-1].lstrip('\\n') -%}{%- endif -%}"""
FORGETS_THOUGHTS = (
    _TOOLS
    + _LAST_QUESTION
    + "{%- for m in messages -%}{%- if m.role == 'assistant' -%}"
    + _SPLIT
    + """{{- '<|im_start|>assistant\\n' -}}§{%- if loop.index0 > ns.last and (loop.last or mind) -%}
{{- '<think>\\n' + mind.strip('\\n') + '\\n</think>\\n\\n' + words.lstrip('\\n') -}}{%- else -%}
{{- words -}}{%- endif -%}"""
    + _CALLS
    + "{{- '<|im_end|>' -}}¶{{- '\\n' -}}{%- elif m.role == 'tool' -%}"
    + _ANSWERS
    + """{%- elif not (loop.first and m.role == 'system') -%}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}{%- endif -%}{%- endfor -%}"""
    + _PROMPT
)

# As Qwen3.5 and Nemotron have it: a macro reads the content, which is trimmed, and the generation
# prompt opens the thoughts.
OPENS_THOUGHTS = (
    """{%- macro said(content) -%}{%- if content is string -%}{{- content -}}{%- else -%}
{%- for part in content -%}{%- if 'text' in part -%}{{- part.text -}}{%- endif -%}{%- endfor -%}
{%- endif -%}{%- endmacro -%}"""
    + """{%- set ns = namespace(last=-1) -%}{%- for m in messages -%}{%- if m.role == 'user' -%}
{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}{%- for m in messages -%}
{%- set words = said(m.content) | trim -%}{%- if m.role == 'assistant' -%}{%- set mind = '' -%}
{%- if m.reasoning_content is string -%}{%- set mind = m.reasoning_content | trim -%}{%- endif -%}
{{- '<|im_start|>assistant\\n' -}}{%- if loop.index0 > ns.last -%}{{- '<think>\\n' -}}§
{{- mind + '\\n</think>\\n\\n' + words + '<|im_end|>' -}}¶{%- else -%}§
{{- words + '<|im_end|>' -}}¶{%- endif -%}{{- '\\n' -}}{%- else -%}
{{- '<|im_start|>' + m.role + '\\n' + words + '<|im_end|>\\n' -}}{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n<think>\\n' -}}{%- endif -%}"""
)

# As Llama 3 has it: headers, content trimmed, the beginning of the text with the first turn.
HEADERS = """{%- for m in messages -%}{%- if loop.first -%}{{- bos_token -}}{%- endif -%}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' -}}{%- if m.role == 'assistant' -%}
§{{- m.content | trim + '<|eot_id|>' -}}¶{%- else -%}{{- m.content | trim + '<|eot_id|>' -}}
{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}"""

# As Gemma 3 has it: the system prompt goes into the first question, roles alternate, an assistant
# is a model, content is a string or parts that are trimmed one by one.
ALTERNATES = """{{- bos_token -}}{%- set before = '' -%}{%- set turns = messages -%}
{%- if messages[0].role == 'system' -%}{%- set turns = messages[1:] -%}
{%- set first = messages[0].content -%}
{%- set before = (first if first is string else first[0].text) + '\\n\\n' -%}{%- endif -%}
{%- for m in turns -%}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}
{{- raise_exception('roles must alternate') -}}{%- endif -%}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' -}}
{%- if m.role == 'assistant' -%}§
{%- if m.content is string -%}{{- m.content | trim -}}{%- else -%}{%- for part in m.content -%}
{{- part.text | trim -}}{%- endfor -%}{%- endif -%}{{- '<end_of_turn>' -}}¶{{- '\\n' -}}
{%- else -%}{{- before if loop.first else '' -}}
{%- if m.content is string -%}{{- m.content | trim -}}{%- else -%}{%- for part in m.content -%}
{{- part.text | trim -}}{%- endfor -%}{%- endif -%}{{- '<end_of_turn>\\n' -}}{%- endif -%}
{%- endfor -%}{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}"""

# As Mistral and Llama 2 have it: no generation prompt, since an answer follows the instruction.
INSTRUCTIONS = """{{- bos_token -}}{%- set ns = namespace(system='') -%}{%- for m in messages -%}
{%- if m.role == 'system' -%}{%- set ns.system = m.content + '\\n\\n' -%}{%- continue -%}
{%- elif m.role == 'user' -%}{{- '[INST] ' + ns.system + m.content + ' [/INST]' -}}
{%- set ns.system = '' -%}{%- else -%}§{{- ' ' + m.content + eos_token -}}¶{%- endif -%}
{%- endfor -%}"""

# As Phi 3 has it: the end of the text where no answer is asked for, whoever spoke last.
ENDS_TEXT = """{%- for m in messages -%}{%- if m.role == 'assistant' -%}{{- '<|assistant|>\\n' -}}§
{{- m.content + '<|end|>' -}}{%- if loop.last -%}{{- '\\n' + eos_token -}}{%- endif -%}¶
{%- if not loop.last -%}{{- '\\n' -}}{%- endif -%}{%- else -%}
{{- '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' -}}{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}
{%- elif messages[-1].role != 'assistant' -%}{{- eos_token -}}{%- endif -%}"""

# As Zephyr has it: the generation prompt is written within the loop.
PROMPTS_WITHIN = """{%- for m in messages -%}{%- if m.role == 'assistant' -%}
{{- '<|assistant|>\\n' -}}§{{- m.content + eos_token -}}¶{%- else -%}
{{- '<|' + m.role + '|>\\n' + m.content + eos_token -}}{%- endif -%}{{- '\\n' -}}
{%- if loop.last and add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}
{%- endfor -%}"""

# As LLaVA has it: plain words for roles, pictures before text, no token at the end of a turn.
PLAIN_ROLES = """{%- for m in messages -%}{{- '' if m.role == 'system' else m.role.upper() -}}
{%- if m.role != 'system' -%}{{- ':' -}}{%- endif -%}
{%- for part in m.content | selectattr('type', 'equalto', 'image') -%}{{- '<image>\\n' -}}
{%- endfor -%}
{%- for part in m.content | selectattr('type', 'equalto', 'text') -%}
{%- if m.role == 'assistant' -%}§{{- ' ' + part.text + ' ' -}}¶{%- else -%}
{{- ' ' + part.text + ' ' -}}{%- endif -%}{%- endfor -%}
{%- endfor -%}{%- if add_generation_prompt -%}{{- 'ASSISTANT:' -}}{%- endif -%}"""

# As Idefics 3 and SmolVLM have it: the first part says whether a space follows the role.
UTTERANCES = """<|im_start|>{%- for m in messages -%}{{- m.role | capitalize + ':' -}}
{%- if m.role == 'assistant' -%}§{%- for part in m.content -%}{%- if loop.first -%}{{- ' ' -}}
{%- endif -%}{{- part.text -}}{%- endfor -%}<end_of_utterance>¶{%- else -%}
{%- if m.content[0].type != 'image' -%}{{- ' ' -}}{%- endif -%}{%- for part in m.content -%}
{{- '<image>' if part.type == 'image' else part.text -}}{%- endfor -%}<end_of_utterance>
{%- endif -%}{{- '\\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'Assistant:' -}}{%- endif -%}"""

# As Qwen2-VL has it: strings or parts, in which it writes the media tokens.
VISION = """{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\\n' -}}
{%- if m.role == 'assistant' -%}§{%- if m.content is string -%}{{- m.content -}}{%- else -%}
{%- for part in m.content -%}{{- part.text -}}{%- endfor -%}{%- endif -%}{{- '<|im_end|>' -}}¶
{%- else -%}{%- if m.content is string -%}{{- m.content -}}{%- else -%}
{%- for part in m.content -%}{%- if part.type == 'image' -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}{%- else -%}{{- part.text -}}{%- endif -%}
{%- endfor -%}{%- endif -%}{{- '<|im_end|>' -}}{%- endif -%}{{- '\\n' -}}{%- endfor -%}"""
VISION += _PROMPT

# As GLM has it: a turn ends where the next role begins, and past thoughts are emptied.
NEXT_ROLE_ENDS = (
    "{{- '[gMASK]<sop>' -}}"
    + _LAST_QUESTION
    + "{%- for m in messages -%}{%- if m.role == 'assistant' -%}"
    + _SPLIT
    + """{{- '<|assistant|>' -}}§
{%- if mind and loop.index0 > ns.last -%}{{- '\\n<think>' + mind.strip() + '</think>' -}}
{%- else -%}{{- '\\n<think></think>' -}}{%- endif -%}
{%- if words.strip() -%}{{- '\\n' + words.strip() -}}{%- endif -%}¶{%- else -%}
{{- '<|' + m.role + '|>\\n' + m.content -}}{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"""
)

# As Gemma 4 has it: answers of tools are looked up by number and written within the turn that asked
# for them, and are skipped where they stand.
ANSWERS_WITHIN = """{{- bos_token -}}{%- for tool in tools or [] -%}{{- tool | tojson -}}
{%- endfor -%}{%- for m in messages -%}{%- if m.role == 'tool' -%}{%- continue -%}{%- endif -%}
{%- if m.role != 'assistant' -%}{{- '<start_of_turn>' + m.role + '\\n' + m.content -}}
{{- '<end_of_turn>\\n' -}}{%- continue -%}{%- endif -%}
{{- '<start_of_turn>model\\n' -}}§{%- for call in m.tool_calls or [] -%}
{{- call.function | tojson -}}{%- endfor -%}¶{%- set ns = namespace(over=false) -%}
{%- for k in range(loop.index0 + 1, messages | length) -%}{%- if messages[k].role != 'tool' -%}
{%- set ns.over = true -%}{%- elif not ns.over -%}{%- set answer = messages[k] -%}
{{- '<tool_response>' ~ answer.content ~ '</tool_response>' -}}{%- endif -%}{%- endfor -%}
§{{- m.content | trim -}}{{- '<end_of_turn>' -}}¶{{- '\\n' -}}
{%- endfor -%}{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}"""

# As DeepSeek R1 has it: the system prompt is gathered first, thoughts are never kept although the
# prompt opens them.
KEEPS_NO_THOUGHTS = """{{- bos_token -}}{%- set ns = namespace(system='') -%}
{%- for m in messages -%}{%- if m.role == 'system' -%}{%- set ns.system = m.content -%}
{%- endif -%}{%- endfor -%}{{- ns.system -}}{%- for m in messages -%}
{%- if m.role == 'user' -%}{{- '<|user|>' + m.content -}}
{%- elif m.role == 'assistant' -%}{%- set words = m.content -%}
{%- if '</think>' in words -%}{%- set words = words.split('</think>')[-1] -%}{%- endif -%}
{{- '<|assistant|>' -}}§{{- words + eos_token -}}¶{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|><think>\\n' -}}{%- endif -%}"""

_BOS = {"bos_token": "<s>", "eos_token": "</s>"}
FAMILIES = {
    "default_system": Family(marked=DEFAULT_SYSTEM, calls=True),
    "forgets_thoughts": Family(marked=FORGETS_THOUGHTS, tags=True, thoughts=True, calls=True),
    "opens_thoughts": Family(marked=OPENS_THOUGHTS, thoughts=True),
    "headers": Family(marked=HEADERS, config=_BOS),
    "alternates": Family(marked=ALTERNATES, parts=True, strict_roles=True, config=_BOS),
    "instructions": Family(marked=INSTRUCTIONS, config=_BOS),
    "ends_text": Family(marked=ENDS_TEXT, config=_BOS),
    "prompts_within": Family(marked=PROMPTS_WITHIN, config=_BOS),
    "plain_roles": Family(marked=PLAIN_ROLES, parts=True, media="<image>", config=_BOS),
    "utterances": Family(marked=UTTERANCES, parts=True, media="<image>", config=_BOS),
    "vision": Family(marked=VISION, parts=True, media="<|image_pad|>"),
    "next_role_ends": Family(marked=NEXT_ROLE_ENDS, tags=True, thoughts=True),
    "answers_within": Family(marked=ANSWERS_WITHIN, calls=True, config=_BOS),
    "keeps_no_thoughts": Family(marked=KEEPS_NO_THOUGHTS, tags=True, config=_BOS),
}
SPECIALS = [
    *("<unk>", "<s>", "</s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "<end_of_utterance>"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "[gMASK]", "<sop>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<image>"),
]
