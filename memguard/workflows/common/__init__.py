"""What audits and training runs share.

folder.py            one folder per run: locks it and checks its settings and files
checks.py            checks settings against processes, libraries and the model's positions
requests.py          checks the arguments of other commands, and paths, before torch is imported
setup.py             process group, device, model and mesh of a run
launch.py            --nproc: runs one command as several processes and reports errors
processes.py         number of processes of a command on this machine, or of torchrun
python_arguments.py  functions for programs: checked arguments, quiet libraries, our errors
"""
