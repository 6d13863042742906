"""The node: announces its slots, starts and watches the actors of jobs, captures their logs.

`process` keeps one actor alive, `output` takes what it writes, `command` says how it is started,
`backoff` when again; `node` answers the scheduler.
"""
