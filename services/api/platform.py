"""Routes of the platform itself."""

from __future__ import annotations

from fastapi import APIRouter

from leyden.libs.contracts.api.body import Page
from leyden.libs.contracts.api.platform import Engine, Health, Pool, Recipe
from leyden.libs.contracts.recipes import RECIPES
from leyden.libs.store.read import views
from leyden.services.api.auth import GuardedRoute, Reader
from leyden.services.api.parameters import Store

router = APIRouter(prefix="/v1", tags=["platform"], route_class=GuardedRoute)


@router.get("/health")
async def get_health(store: Store, caller: Reader) -> Health:
    """Show the platform: database, schema, engines and work at hand."""
    async with store.read() as session:
        engines = await views.list_engines(session)
        queued, live = await views.count_work(session)
        revision = await views.schema_revision(session)
    serving = any(engine.state != "unreachable" for engine in engines)
    return Health(
        status="ok" if serving else "degraded",
        database="ok",
        schema_revision=revision,
        engines=engines,
        queued_rollouts=queued,
        live_attempts=live,
    )


@router.get("/pools")
async def get_pools(store: Store, caller: Reader) -> Page[Pool]:
    """List the pools that runs may name, with their engines, the runs that have them and the runs that wait."""
    async with store.read() as session:
        return Page(items=await views.list_pools(session))


@router.get("/recipes")
async def get_recipes(caller: Reader) -> Page[Recipe]:
    """List the recipes that a run's document may begin with, with their settings."""
    return Page(items=[Recipe(name=name, **vars(recipe)) for name, recipe in RECIPES.items()])


@router.get("/engines")
async def get_engines(store: Store, caller: Reader) -> Page[Engine]:
    """List engines and what each was last seen serving."""
    async with store.read() as session:
        return Page(items=await views.list_engines(session))
