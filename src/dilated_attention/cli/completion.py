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
    from dilated_attention.cli.app import parsers

    made = parsers()
    cases = "\n".join(f'        {name}) words="{" ".join(x._option_string_actions)}" ;;' for name, x in made.items())
    print(COMPLETION.format(commands=" ".join(made), cases=cases).strip())
