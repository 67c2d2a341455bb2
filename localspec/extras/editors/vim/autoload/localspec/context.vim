" What a completion is asked with: the text around the cursor, and pieces of where the person was before.

" Bytes before and after the cursor. The daemon reads what it has time for, at most some 2000 tokens, and
" cuts at a line that stays the same while somebody types; this is more than that, and cut at places that
" stay, too: whole blocks of lines.
let s:before = 32768
let s:after = 8192
let s:block = 64

let s:piece = 48       " lines of a piece
let s:widest = 4096    " bytes of one
let s:least = 4        " lines with something in them
let s:most = 12        " pieces
let s:pieces = []      " those that are sent, oldest first
let s:next = []        " those that will be sent
let s:were = {}        " the line that was left last, by buffer

" The fields of a request for what stands at the cursor; `line` is its line, cut at `column` bytes.
function! localspec#context#fields(lnum, line, column) abort
  return {
        \ 'input_prefix': localspec#context#before(a:lnum),
        \ 'prompt': s:end(strpart(a:line, 0, a:column), s:before),
        \ 'input_suffix': s:beginning(strpart(a:line, a:column) .. s:ended(a:lnum) .. localspec#context#after(a:lnum), s:after),
        \ 'input_extra': map(copy(s:pieces), {_, piece -> {'filename': piece.name, 'text': piece.text}}),
        \ }
endfunction

" What ends a line in the file: nothing, of a last line that is to stay without.
function! s:ended(lnum) abort
  return a:lnum < line('$') || &endofline || &fixendofline ? "\n" : ''
endfunction

" The lines above a line: at least so many bytes as are wanted, where there are as many, and no more than a
" block above those.
function! localspec#context#before(lnum) abort
  let here = line2byte(a:lnum)
  let first = a:lnum / s:block * s:block + 1
  while first > 1 && (first >= a:lnum || here - line2byte(first) < s:before)
    let first -= s:block
  endwhile
  return s:end(s:joined(getline(first, a:lnum - 1)), 2 * s:before)
endfunction

" The lines below a line.
function! localspec#context#after(lnum) abort
  let last = min([a:lnum + s:block, line('$')])
  return s:beginning(s:joined(getline(a:lnum + 1, last)), s:after)
endfunction

function! s:joined(lines) abort
  return empty(a:lines) ? '' : join(a:lines, "\n") .. "\n"
endfunction

" The end of a text, of about `most` bytes: cut at a multiple of as many, so that it begins alike while
" text comes in behind it, and at a character.
function! s:end(text, most) abort
  let over = strlen(a:text) - a:most
  if over <= 0
    return a:text
  endif
  let from = (over + a:most / 2 - 1) / (a:most / 2) * (a:most / 2)
  return s:whole(strpart(a:text, from), 0)
endfunction

function! s:beginning(text, most) abort
  return strlen(a:text) > a:most ? s:whole(strpart(a:text, 0, a:most), 1) : a:text
endfunction

" Without what a cut left of a character, at the text's end or at its beginning.
function! s:whole(text, at_end) abort
  let [from, to] = [0, strlen(a:text)]
  if a:at_end
    while to > 0 && to > strlen(a:text) - 4 && and(char2nr(strpart(a:text, to - 1, 1), 0), 0xC0) == 0x80
      let to -= 1
    endwhile
    let first = to > 0 ? char2nr(strpart(a:text, to - 1, 1), 0) : 0
    let bytes = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : first >= 0xC0 ? 2 : 1
    let to = to - 1 + bytes > strlen(a:text) ? to - 1 : strlen(a:text)
  else
    while from < 4 && from < to && and(char2nr(strpart(a:text, from, 1), 0), 0xC0) == 0x80
      let from += 1
    endwhile
  endif
  return strpart(a:text, from, max([to - from, 0]))
endfunction

" Somebody leaves this place, or has come far from the last one: what stands here may matter later. It is
" sent from the next quiet moment on, since whatever changes in front of a prompt has it read anew.
function! localspec#context#left() abort
  if &buftype !=# '' || !&buflisted || empty(expand('%'))
    return
  endif
  let s:were[bufnr()] = line('.')
  let first = max([1, line('.') - s:piece / 2])
  let text = s:beginning(s:joined(getline(first, first + s:piece - 1)), s:widest)
  if len(filter(split(text, "\n"), {_, line -> line =~# '\S'})) < s:least
    return
  endif
  let piece = {'path': expand('%:p'), 'first': first, 'name': expand('%:t'), 'text': text}
  call s:without(s:next, piece)
  call add(s:next, piece)
endfunction

" The cursor rests: far from where it was last?
function! localspec#context#rests() abort
  if abs(line('.') - get(s:were, bufnr(), -s:block)) >= s:block
    call localspec#context#left()
  endif
endfunction

" Take what waits among the pieces; whether there was any.
function! localspec#context#take() abort
  if empty(s:next)
    return 0
  endif
  for piece in s:next
    call s:without(s:pieces, piece)
  endfor
  let s:pieces = (s:pieces + s:next)[max([0, len(s:pieces + s:next) - s:most]) :]
  let s:next = []
  return 1
endfunction

" Drop the pieces that show much of what this one shows.
function! s:without(pieces, piece) abort
  call filter(a:pieces, {_, each -> each.text !=# a:piece.text
        \ && (each.path !=# a:piece.path || abs(each.first - a:piece.first) >= s:piece * 3 / 4)})
endfunction
