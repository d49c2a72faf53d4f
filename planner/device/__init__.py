"""Everything that differs from one kind of device to another: its clock, its memory, its name."""
