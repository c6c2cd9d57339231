// Lists page by page, as the API gives them: the cursors of the pages before lead back.

import type { ComponentChildren } from "preact";
import { useRef, useState } from "preact/hooks";
import { usePolled, type Page } from "./api";
import type { Part } from "./live";
import { Loaded, clock } from "./parts";

interface PagedProperties<Item, Shown extends Page<Item>> {
  /** The path with its parameters, the limit included. */
  path: string;
  limit: number;
  /** The whole list is empty. */
  nothing: ComponentChildren;
  isLive?: (data: Shown) => boolean;
  parts?: readonly Part[];
  isExact?: boolean;
  /** The page, and the place of its first item in the list, from 0. */
  children: (page: Shown, first: number) => ComponentChildren;
}

/** One page of a list with the buttons to the pages beside it; another path begins at the first page. */
export function Paged<Item, Shown extends Page<Item> = Page<Item>>(properties: PagedProperties<Item, Shown>) {
  return <Pages key={properties.path} {...properties} />;
}

function Pages<Item, Shown extends Page<Item>>({ path, limit, nothing, isLive, parts, isExact, children }: PagedProperties<Item, Shown>) {
  const [cursors, setCursors] = useState<string[]>([]);
  const cursor = cursors[cursors.length - 1];
  const asked = `${path}${path.includes("?") ? "&" : "?"}limit=${limit}${cursor ? `&cursor=${encodeURIComponent(cursor)}` : ""}`;
  const answer = usePolled<Shown>(asked, isLive, parts, isExact);
  const first = cursors.length * limit;
  // The first page alone counts.
  const total = useRef<number | null>(null);
  total.current = answer.data?.total ?? total.current;
  return (
    <Loaded answer={answer}>
      {(data) =>
        data.items.length === 0 && cursors.length === 0 ? <>{nothing}</> : (
          <>
            {children(data, first)}
            <p class="quiet" role="status">{first + 1} to {first + data.items.length}{total.current !== null && ` of ${total.current.toLocaleString()}`}{answer.at && `, as of ${clock(answer.at)}`}</p>
            {(cursors.length > 0 || data.next_cursor) && (
              <p class="pages">
                <button type="button" disabled={cursors.length === 0} onClick={() => setCursors(cursors.slice(0, -1))}>Page before</button>
                <button type="button" disabled={!data.next_cursor} onClick={() => data.next_cursor && setCursors([...cursors, data.next_cursor])}>Next page</button>
              </p>
            )}
          </>
        )
      }
    </Loaded>
  );
}
