# Create a virtual environment with the tested versions, once; to be sourced.
# Sets $venv and $python; make_environment EXTRAS installs .[EXTRAS] unless it is installed.

venv="${MEMGUARD_VENV:-.venv}"
python="$venv/bin/python"

make_environment() {
  local extras="$1" stamp="$venv/.memguard-$1" inputs
  inputs="$(cat pyproject.toml constraints.txt | sha256sum)"
  [ -x "$python" ] || python3 -m venv "$venv"
  if [ "$(cat "$stamp" 2>/dev/null)" != "$inputs" ]; then
    echo "installing memguard${extras:+[$extras]} into $venv (once)"
    "$python" -m pip install --quiet --disable-pip-version-check \
      -c constraints.txt -e ".${extras:+[$extras]}"
    "$python" -m compileall -q memguard
    echo "$inputs" >"$stamp"
  fi
}
