"""The public names of other systems, over this one."""
