"""What audits and training runs share.

folder.py            one folder per run: locks it and checks its settings and files
checks.py            paths, mesh and processes, checked before torch is imported
setup.py             process group, device, model and mesh of a run
launch.py            --nproc: runs one command as several processes and reports errors
python_arguments.py  functions for programs: checked arguments, quiet libraries, our errors
"""
