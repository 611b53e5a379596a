"""Write the captioned tree at the end of README.md from the files' own first lines.

python scripts/readme_tree.py          rewrite README.md
python scripts/readme_tree.py --check  exit 1 if it is not up to date
"""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
START, END = "<!-- tree: scripts/readme_tree.py -->\n```text\n", "```\n<!-- /tree -->"
FOLDERS = ("memguard", "scripts", "eval", "configs")


def caption(path: Path) -> str:
    """Return the first line of a file's docstring or comment, without its full stop."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        first = (ast.get_docstring(ast.parse(text)) or "").split("\n")[0]
    else:
        comments = [line for line in text.splitlines() if line.startswith("#")]
        lines = [line.lstrip("# ") for line in comments if not line.startswith("#!")]
        first = lines[0] if lines else ""
    return first.split(". ")[0].rstrip(".:")


def build_tree() -> str:
    """Return the tree of tracked files as text."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *FOLDERS]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = sorted(ROOT / name for name in listed.splitlines() if (ROOT / name).is_file())
    wanted = [f for f in files if f.suffix in (".py", ".sh", ".yaml") and f.stat().st_size]
    lines: list[str] = []
    folders: set[Path] = set()
    for file in sorted(wanted, key=lambda f: (f.parent.parts, f.name != "__init__.py", f.name)):
        folder = file.parent.relative_to(ROOT)
        for depth in range(1, len(folder.parts) + 1):
            part = Path(*folder.parts[:depth])
            if part not in folders:
                folders.add(part)
                init = ROOT / part / "__init__.py"
                about = caption(init) if init.exists() else ""
                lines.append(f"{'  ' * (depth - 1) + part.name + '/':<28}{about}".rstrip())
        if file.name != "__init__.py":
            name = "  " * len(folder.parts) + file.name
            lines.append(f"{name:<27} {caption(file)}".rstrip())
    lines.append(f"{'tests/':<28}Mirror memguard/; need neither GPU nor network")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Rewrite or check the tree in README.md."""
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    wanted = before + START + build_tree() + END + after
    if "--check" in sys.argv[1:]:
        return int(wanted != text)
    readme.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
