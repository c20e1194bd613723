"""Reading the files of a stopped broker."""
