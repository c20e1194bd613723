"""Reading the files of a stopped broker."""

FORMAT = "rocketmq-store"
