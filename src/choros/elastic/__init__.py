"""Training that goes on while ranks are lost and join: what an epoch has consumed, commits, Horovod's elastic API."""
