"""What fits where, and what a run will do, told before anything is started."""
