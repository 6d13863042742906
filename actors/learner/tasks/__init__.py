"""Which tasks are issued, admitted, trained and issued again. Nothing here imports torch."""
