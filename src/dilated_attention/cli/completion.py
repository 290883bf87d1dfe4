"""Print what makes bash or zsh complete commands and options.

Example: eval "$(dilated-attention completion)"
"""

from __future__ import annotations

from argparse import Namespace

COMPLETION = """
_dilated_attention() {{
    local words="{commands}"
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
    [ "$COMP_CWORD" -gt 1 ] || words="{commands}"
    COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
[ -z "$ZSH_VERSION" ] || {{ autoload -U +X bashcompinit && bashcompinit; }}
complete -o default -F _dilated_attention dilated-attention
"""
OPTIONS = ()


def run(given: Namespace) -> None:
    words = {name: " ".join(parser._option_string_actions) for name, parser in given.parsers.items()}
    cases = "\n".join(f'        {name}) words="{options}" ;;' for name, options in words.items())
    print(COMPLETION.format(commands=" ".join(words), cases=cases).strip())
