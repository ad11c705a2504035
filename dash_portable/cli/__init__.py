"""The commands, a file each; they show what the package's functions give and decide nothing."""
