"""The auth service: lets users and job processes into the broker, and reads and stores for guests.

`callout` decides on each log-in and `claims` signs the answer; `user_requests` answers what admins
ask about users, `job_keys` what nodes ask for their actors; `store_proxy` passes on what guests
read and store; `kicks` closes connections; `service` wires the parts.
"""
