"""What runs in processes of its own: each module has a function ``examine`` for `probe.ask`."""
