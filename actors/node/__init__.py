"""The node: announces its slots, starts and watches the actors of jobs, captures their logs.

`node` answers the scheduler; `process` keeps one actor alive and reads its output; `children`,
`sandbox` and `fork_server` start it.
"""
