"""Chat templates in few words: what those of the families in use do beside a plain loop over the messages."""

from __future__ import annotations

# Each looks at one more thing: the first message, those beside its own, its own number, variables, inner loops.
SMOLLM = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}[default]{% endif %}"
    "<{{ message['role'] }}>{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
QWEN = (
    "{%- if tools %}{{ tools | tojson }}{%- else %}{%- if messages[0].role == 'system' %}{{ messages[0].content }}"
    "{%- endif %}{%- endif %}{%- for message in messages %}"
    "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}<{{ message.role }}>"
    "{{ message.content }}{%- elif message.role == 'assistant' %}<a>{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}{% if not loop.first %},{% endif %}{{ loop.index0 }}"
    "{{ call.function.name }}"
    "{%- endfor %}{%- elif message.role == 'tool' %}"
    "{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}<results>{%- endif %}{{ message.content }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}</results>{%- endif %}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}<a>{%- endif %}"
)
NUMBERED = (
    "{% set mark = '#' if style is undefined else style %}{% set seen = 'none' %}{% for m in messages %}"
    "{% if loop.index is odd %}{% set seen = m.content %}{% endif %}{{ loop.index }}{{ mark }}{{ seen }}"
    "{{ messages[loop.index - 2].role if loop.index0 else '-' }}{{ messages[loop.index].role if not loop.last }}"
    "{{ m.content | upper }}"
    "{% endfor %}{{ messages[-1].role }}{{ messages | length }}"
)
LEAVING = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{% continue %}{% endif %}"
    "{% if loop.index0 > 4 %}{% break %}{% endif %}{% generation %}{{ m.content }}{% endgeneration %}|{% endfor %}!"
)
REFUSING = (
    "{{ tools }}{% for m in messages %}{% if m.role == 'tool' and messages[loop.index0 - 1].role == 'tool' %}"
    "{{ raise_exception('two') }}{% endif %}{{ m.content }}{% endfor %}"
)
# What the families in use do beside a plain loop, each in few words.
QWEN3 = (
    "{{ tools }}"
    "{%- set ns = namespace(open=true, last=messages | length - 1) %}{%- for message in messages[::-1] %}"
    "{%- set index = (messages | length - 1) - loop.index0 %}"
    "{%- if ns.open and message.role == 'user' and not message.content.startswith('<r>') %}"
    "{%- set ns.open = false %}{%- set ns.last = index %}{%- endif %}{%- endfor %}"
    "{%- for message in messages %}<{{ message.role }}>{%- if loop.index0 > ns.last %}{{ message.content }}"
    "{%- else %}{{ message.content.split('</think>')[-1] }}{%- endif %}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}|{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}<assistant>{%- endif %}"
)
GLM = (
    "{{ tools }}"
    "{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.last = loop.index0 -%}{%- endif %}{%- endfor %}"
    "{% for m in messages %}{%- if ns.last < loop.index %}{{ m.content }}{%- else %}"
    "{{ m.content.split('</think>')[-1] }}"
    "{%- endif %}|{% endfor %}"
)
LLAMA = (
    "{%- if not today is defined %}{%- set today = strftime_now('%Y') %}{%- endif %}"
    "{%- if messages[0].role == 'system' %}{%- set said = messages[0].content | trim %}"
    "{%- set messages = messages[1:] %}"
    "{%- else %}{%- set said = '' %}{%- endif %}{{ today }}{{ said }}"
    "{%- if tools and messages | length %}{%- set first = messages[0].content %}{%- set messages = messages[1:] %}"
    "{{ tools | tojson }}{{ first }}{%- endif %}"
    "{%- for m in messages %}[{{ m.role }}]{{ m.content | trim }}{%- endfor %}{{ add_generation_prompt }}"
)
MISTRAL = (
    "{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set rest = messages[1:] %}"
    "{%- else %}{%- set rest = messages %}{%- endif %}{%- if not tools is defined %}{%- set tools = none %}{%- endif %}"
    "{%- set asked = rest | selectattr('role', 'equalto', 'user') | list %}{%- set ns = namespace(n=0) %}"
    "{%- for m in rest %}{%- if m.role == 'user' %}{%- set ns.n = ns.n + 1 %}{%- endif %}"
    "{%- if ns.n > 20 %}{{ raise_exception('too many') }}{%- endif %}{%- endfor %}"
    "{%- for m in rest %}{%- if tools is not none and m == asked[-1] %}{{ tools | tojson }}{%- endif %}"
    "{%- if loop.last and system is defined %}{{ system }}{%- endif %}[{{ m.role }}]{{ m.content }}{%- endfor %}"
)
GEMMA = (
    "{%- if messages[0].role == 'system' -%}{%- set prefix = messages[0].content + '~' -%}"
    "{%- set rest = messages[1:] -%}{%- else -%}{%- set prefix = '' -%}{%- set rest = messages -%}{%- endif -%}"
    "{%- for m in rest -%}{{ loop.index0 % 2 }}{{ prefix if loop.first }}{{ m.role }}{{ m.content }}{%- endfor -%}"
)
DEEPSEEK = (
    "{{ tools }}"
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
    "{% set ns = namespace(tool=false, first=true, said='') %}{%- for m in messages %}{%- if m.role == 'system' %}"
    "{%- set ns.said = ns.said + m.content %}{%- endif %}{%- endfor %}{{ ns.said }}"
    "{%- for m in messages %}{%- if m.role == 'tool' %}{%- set ns.tool = true %}"
    "{{ '<outputs>' if ns.first }}{%- set ns.first = false %}{{ m.content }}"
    "{%- elif ns.tool %}</outputs>{{ m.content }}{%- set ns.tool = false %}"
    "{%- else %}{{ m.content }}{%- endif %}{%- endfor %}"
    "{% if ns.tool %}</outputs>{% endif %}"
)
PICTURES = (
    "{{ tools }}"
    "{%- set seen = namespace(value=0) %}{%- macro show(content, counts) %}{%- if counts and '{{' in content %}"
    "{%- set seen.value = seen.value + 1 %}{%- endif %}{{ seen.value }}{{ content }}{%- endmacro %}"
    "{%- set ns = namespace(open=true, last=0) %}{%- for m in messages[::-1] %}"
    "{%- set index = (messages | length - 1) - loop.index0 %}{%- if ns.open and m.role == 'user' %}"
    "{%- set text = show(m.content, m.role == 'tool') | trim %}{%- if 'a' in text %}{%- set ns.open = false %}"
    "{%- set ns.last = index %}{%- endif %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{{ show(m.content, true) }}{{ '!' if loop.index0 >= ns.last }}"
    "{{ loop.previtem.role if loop.previtem }}{{ loop.nextitem.role if loop.nextitem }};{%- endfor %}"
)
# Counts what it looks at: the search is no pure one.
COUNTED_SEARCH = PICTURES.replace("m.role == 'tool')", "true)")
GPT_OSS = (
    "{{ tools }}"
    "{%- macro now() %}{{ strftime_now('%Y') }}{%- endmacro %}{{ now() }}"
    "{%- set before = namespace(name=none) %}{%- for m in messages %}{%- if m.tool_calls %}"
    "{%- set later = namespace(found=false) %}{%- for other in messages[loop.index:] %}"
    "{%- if other.role == 'assistant' %}{%- set later.found = true %}{%- endif %}{%- endfor %}{{ later.found }}"
    "{%- set before.name = m.tool_calls[0].function.name %}{%- elif m.role == 'tool' %}{{ before.name }}{{ m.content }}"
    "{%- elif loop.last and not add_generation_prompt %}<final>{{ m.content }}{%- else %}{{ m.content }}{%- endif %}"
    "{%- endfor %}"
)
# Writes empty thoughts before the last answer alone, as Qwen3 does, and an end of all after it, as Phi does.
LAST_APART = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ '<think></think>' if m.role == 'assistant' and loop.last and '</think>' not in m.content }}"
    "{{ m.content if loop.last else m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}<|endoftext|>{% endif %}"
)
