"""The auth service: authenticates users and job processes, and reads and stores for guests.

`callout` decides on each login and signs the answer; `store_proxy` forwards what guests read and
store; `connections` closes connections; `service` wires the parts, and answers admins' requests
about users and nodes' requests for keys.
"""
