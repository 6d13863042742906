"""The auth service: lets users and job processes into the broker, and reads and stores for guests.

`callout` decides on each log-in and signs the answer; `store_proxy` passes on what guests read and
store; `connections` closes connections; `service` wires the parts, and answers what admins ask
about users and what nodes ask for their actors.
"""
