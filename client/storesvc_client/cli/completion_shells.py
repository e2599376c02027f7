"""Completion in bash and zsh, in place of that of click.

Readline divides words at the characters of ``COMP_WORDBREAKS``, which "@", ":" and "="
are, and replaces only what follows the last of them; so a candidate loses what comes
before. zsh replaces the whole word, and quotes what it inserts. Candidates come from a
store: what a shell would execute or expand is quoted.
"""

import os
import sys
import threading
from dataclasses import dataclass
from typing import ClassVar, Final

from click.shell_completion import (
    BashComplete,
    CompletionItem,
    ZshComplete,
    add_completion_class,
)

_LIMIT: Final = 4.0
"""Maximum seconds of a completion."""

_PLAIN: Final = frozenset(
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_./@:%+=,-"
)
"""Characters that no shell changes."""

_SPECIAL_IN_DOUBLE_QUOTES: Final = frozenset('"$`\\')


def prepare(instruction: str) -> None:
    """Prepares this process for an instruction of a shell, such as "bash_complete": a
    completion writes no errors, and ends soon."""
    add_completion_class(_Bash)
    add_completion_class(_Zsh)
    if instruction.endswith("_complete"):
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, sys.stderr.fileno())
        timer = threading.Timer(_LIMIT, os._exit, [1])
        timer.daemon = True
        timer.start()


@dataclass(frozen=True, slots=True, kw_only=True)
class TypedLine:
    """A command line up to the cursor."""

    words: tuple[str, ...]
    """The words before the last one, without quotes."""
    text: str
    """The last word, which may be empty, without quotes."""
    quote: str
    """The quote that is open at the cursor, or ""."""
    replaced_from: int
    """Position in ``text`` from which readline replaces it."""


def parse_line(line: str, breaks: str) -> TypedLine:
    """Returns the words of a line as bash sees them.

    >>> parse_line("storectl ls prod/llama-8b@la", "@:=").replaced_from
    14

    Args:
        line: The line up to the cursor.
        breaks: Value of ``COMP_WORDBREAKS``.
    """
    words: list[str] = []
    text, quote, is_word, cut = "", "", False, 0
    chars = iter(line)
    for char in chars:
        if char == quote:
            quote = ""
        elif char == "\\" and quote != "'":
            text, is_word = text + next(chars, ""), True
        elif quote:
            text += char
        elif char in "'\"":
            quote, is_word, cut = char, True, len(text)
        elif char.isspace():
            if is_word:
                words.append(text)
            text, is_word, cut = "", False, 0
        else:
            text, is_word = text + char, True
            cut = len(text) if char in breaks else cut
    return TypedLine(words=tuple(words), text=text, quote=quote, replaced_from=cut)


def quoted(value: str, quote: str) -> str | None:
    """Returns a value as it is typed after an open quote, or without one; None if it
    cannot be."""
    match quote:
        case "'":
            return None if "'" in value else value
        case '"':
            if "!" in value:  # bash keeps a backslash before it
                return None
            special = _SPECIAL_IN_DOUBLE_QUOTES
            return "".join(f"\\{c}" if c in special else c for c in value)
        case _:
            return "".join(
                c if c in _PLAIN or ord(c) > 127 else f"\\{c}" for c in value
            )


class _Bash(BashComplete):
    """Completion in bash."""

    source_template: ClassVar[str] = """\
%(complete_func)s() {
    local line
    COMPREPLY=()
    while IFS= read -r line; do
        case "$line" in
            dir,* | file,*) compopt -o default ;;
            part,*) compopt -o nospace; COMPREPLY+=("${line#*,}") ;;
            plain,*) COMPREPLY+=("${line#*,}") ;;
        esac
    done < <(COMP_LINE="${COMP_LINE:0:COMP_POINT}" COMP_WORDBREAKS="$COMP_WORDBREAKS" \\
        %(complete_var)s=bash_complete "$1" 2>/dev/null)
}

complete -o nosort -F %(complete_func)s %(prog_name)s
"""

    def get_completion_args(self) -> tuple[list[str], str]:
        """Returns the words of the command, and the one to complete."""
        line = os.environ["COMP_LINE"]
        self._typed = parse_line(line, os.environ.get("COMP_WORDBREAKS", ""))
        return [*self._typed.words[1:]], self._typed.text

    def format_completion(self, item: CompletionItem) -> str:
        """Returns the line of a candidate for the shell function."""
        typed = self._typed
        cut = typed.replaced_from
        if typed.text.startswith("-") and not item.value.startswith("-"):
            # click completes the value alone of --option=value
            cut -= typed.text.find("=") + 1
        value = quoted(item.value[max(cut, 0) :], typed.quote)
        kind = "part" if item.is_part and item.type == "plain" else item.type
        return "" if value is None else f"{kind},{value}"


class _Zsh(ZshComplete):
    """Completion in zsh."""

    source_template: ClassVar[str] = """\
#compdef %(prog_name)s

%(complete_func)s() {
    local -a described plain parts response
    (( ! $+commands[%(prog_name)s] )) && return 1

    response=("${(@f)$(env COMP_WORDS="${words[*]}" COMP_CWORD=$((CURRENT-1)) \\
%(complete_var)s=zsh_complete %(prog_name)s 2>/dev/null)}")

    for type key descr in ${response}; do
        if [[ "$type" == "part" ]]; then
            parts+=("$key")
        elif [[ "$type" == "plain" && "$descr" == "_" ]]; then
            plain+=("$key")
        elif [[ "$type" == "plain" ]]; then
            described+=("$key":"$descr")
        elif [[ "$type" == "dir" ]]; then
            _path_files -/
        elif [[ "$type" == "file" ]]; then
            _path_files -f
        fi
    done

    [ -n "$described" ] && _describe -V unsorted described -U
    [ -n "$plain" ] && compadd -U -V unsorted -a plain
    [ -n "$parts" ] && compadd -U -S '' -V unsorted -a parts
}

if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    %(complete_func)s "$@"
else
    compdef %(complete_func)s %(prog_name)s
fi
"""

    def get_completion_args(self) -> tuple[list[str], str]:
        """Returns the words of the command, and the one to complete."""
        words, text = super().get_completion_args()
        name, sign, _ = text.partition("=")
        # click completes the value alone of --option=value, but zsh replaces the word
        self._lead = name + sign if sign and name.startswith("--") else ""
        return words, text

    def format_completion(self, item: CompletionItem) -> str:
        """Returns the lines of a candidate for the shell function."""
        if not item.value.startswith("--"):
            item.value = self._lead + item.value
        if item.is_part:
            return f"part\n{item.value}\n_"
        return super().format_completion(item)
