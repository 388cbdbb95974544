"""`GET /`: a page for a person who opens the service in a browser."""

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

router = APIRouter()

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>gemm-tuner</title>
<style>
  body { font: 1rem/1.5 system-ui, sans-serif; max-width: 40rem; margin: 2rem auto }
  label { display: inline-block; margin: 0 1rem .5rem 0 }
  input { font: inherit; width: 7rem }
</style>
<h1>gemm-tuner</h1>
<p>Which kernel should run <code>y = epilogue(x @ w.T)</code> on this CPU?</p>
<form action="/v1/kernels">
  <label>m <input name="m" value="128" required></label>
  <label>n <input name="n" value="3072" required></label>
  <label>k <input name="k" value="768" required></label>
  <label>epilogue <input name="epilogue" value="bias+gelu_erf"></label>
  <label>threads <input name="threads" value="1"></label>
  <label>regime <input name="regime" value="hot" list="regimes"></label>
  <datalist id="regimes"><option>hot<option>cold_weights</datalist>
  <button>Ask</button>
</form>
<p>
  <a href="/v1/records">Records</a> ·
  <a href="/v1/keys">Public keys</a> ·
  <a href="/openapi.json">OpenAPI</a> ·
  <a href="/docs">Interface</a> ·
  <a href="/readyz">Health</a>
</p>
</html>
"""


@router.get("/", include_in_schema=False, response_class=HTMLResponse)
def read_home() -> str:
    """Return a form that asks `GET /v1/kernels`, and where else to look."""
    return PAGE
