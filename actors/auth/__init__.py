"""The auth service: lets users and job processes into the broker, and answers for them at the door.

`callout` decides on each log-in and `claims` signs the answer; `desk` answers what admins ask about
users, `job_keys` what nodes ask for their actors; `door` passes on what guests read and store;
`kicks` closes connections, `audit` writes down; `service` wires the parts.
"""
