"""What audits and training runs share.

folder.py            one folder per run: locks it and checks its settings and files
checks.py            paths, mesh and processes, checked before torch is imported
setup.py             process group, device, model and mesh of a run
launch.py            --nproc: runs one command as several processes and reports errors
format_arguments.py  the format of an audit's documents: options, and arguments of a call
python_arguments.py  functions for programs: checked arguments, quiet libraries, our errors
trained_counts.py    how often documents were trained, as a callback counted it
"""
