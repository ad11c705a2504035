"""A document goes through attention on this machine, and the oracle looks at what came out.

`inputs` makes what a layer would be handed, `feed` keeps the caches and runs the steps, `verify`
holds rows against the oracle. The command line and the self-test of backends stand on these.
"""
