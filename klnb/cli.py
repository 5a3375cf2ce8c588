"""The console script `klnb`: `klnb audit package.module:function`, `audit` for a shell or a CI job."""

import argparse
import contextlib
import importlib
import json
import sys
from functools import reduce

DESCRIPTION = """Which divergence does a KL loss follow? Prints the verdict on a function
fn(logp, ref_logp, mask, behavior_logp) -> scalar loss, from its exact expected gradient on small policies.
Exit status: 0; 1 if --expect does not hold (the report is printed); 2 for a bad target or loss."""


def main(argv=None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser("klnb", description="Tools for KL terms in RL for language models.")
    commands = parser.add_subparsers(dest="command", required=True)
    ap = commands.add_parser(
        "audit", help="name the divergence that a KL loss follows", description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    ap.add_argument("target", metavar="package.module:function", help="looked up from the current folder first")
    ap.add_argument("--expect", metavar="FIELD", help="R_seq, F_seq, R_tok, F_tok, R_tok_mu, F_tok_mu or zero")
    ap.add_argument("--off-policy", action="store_true", help="also audit rows that another policy sampled")
    ap.add_argument("--batch-size", type=int, default=1, metavar="N", help="1 to 3, for losses that couple rows")
    ap.add_argument("--rtol", type=float, default=1e-6, help="default 1e-6; about 1e-4 for float32 code")
    ap.add_argument("--json", action="store_true", help="print the report as JSON")
    args = parser.parse_args(argv)
    sys.path.insert(0, "")
    from klnb.auditing import AuditError, audit  # after the arguments: torch takes a second

    status = 0
    try:
        module, _, name = args.target.partition(":")
        if not (module and name):
            raise ValueError(f"expected package.module:function, got {args.target!r}")
        options = {k: getattr(args, k) for k in ("expect", "off_policy", "batch_size", "rtol")}
        with contextlib.redirect_stdout(sys.stderr):  # what the target prints is no part of the report
            report = audit(reduce(getattr, name.split("."), importlib.import_module(module)), **options)
    except AuditError as e:
        report, status = e.report, 1
    except (Exception, SystemExit) as e:  # the target is anyone's code: whatever it raises is a bad target
        kind = "" if isinstance(e, ValueError) else f"{type(e).__name__}: "
        print(f"klnb audit: {args.target}: {kind}{' '.join(str(e).split())}", file=sys.stderr)
        return 2
    print(json.dumps(report.to_dict(), indent=2, ensure_ascii=False) if args.json else report)
    if status:
        print(f"klnb audit: expected {args.expect}, found {report.verdict}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
