"""The guard in front of the router: passes on the API and nothing else.

The router's own port has no walls: beside the OpenAI API it takes orders to add and remove workers, and hands every
path that it does not know to a decode pod. So it listens on loopback only, and this process is the gateway's port. It
reads and rebuilds the head of every request, streams bodies, and passes answers on as they are.

`python -m specserve_workers.gateway FLAGS -- ROUTER FLAGS`. It imports no engine: it starts at once, in little memory.
"""
